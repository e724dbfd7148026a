"""The state of the draft depths (MTP): what was guessed is run again when the tokens are known.

The engine does not draft yet; this drives the state by itself. `--mtp` will add served drafts.
"""

import random
from collections.abc import Sequence

import torch

from suzuri.engine.drafts import DraftSequence, DraftState
from suzuri.tools.golden import draft_chain
from suzuri.tools.verify.lab import Lab, Mismatch, NotTested


def has_drafts(lab: Lab) -> bool:
    return lab.model.draft is not None


def draft_state(lab: Lab, page: int) -> None:
    """Sequences that take different numbers of tokens at each step, together; every depth's logits
    as from a run of all rows. A new sequence takes the pages and the slot of one that ended."""
    lengths = (lab.long, 7, lab.long // 3, lab.long // 2)
    lists = [lab.ids(length, 500 + i) for i, length in enumerate(lengths)]
    pages = len(lists) * (-(-lab.long // page) + 2)
    state = DraftState(
        lab.model,
        page_size=page,
        pages={"global": pages, "local": pages},
        slots=4,
        snapshots=1,
    )
    chance = random.Random(lab.config.seed)
    waiting, free = list(enumerate(lists)), [1, 2, 3]
    running: list[tuple[int, list[int], DraftSequence, int]] = []
    accepted: set[int] = set()
    while waiting or running:
        while waiting and free:
            number, ids = waiting.pop(0)
            running.append((number, ids, state.open(free.pop()), 0))
        going: list[tuple[int, list[int], DraftSequence, int, int]] = []
        for number, ids, sequence, done in running:
            # A first chunk, then as many as a verify step may accept.
            most = len(ids) // 2 if not done else state.depths + 1
            now = min(len(ids) - 1, done + chance.randint(1, max(most, 1)))
            accepted.update({now - done} if done else ())
            going.append((number, ids, sequence, done, now))
        _step(lab, state, going)
        running = []
        for number, ids, sequence, _, now in going:
            if now < len(ids) - 1:
                running.append((number, ids, sequence, now))
            else:
                state.close(sequence)
                free.append(sequence.slot)
    if not accepted >= {1, min(2, state.depths + 1)}:
        raise NotTested(f"steps took {sorted(accepted)} tokens")


def _step(
    lab: Lab,
    state: DraftState,
    going: Sequence[tuple[int, list[int], DraftSequence, int, int]],
) -> None:
    """Gives each sequence its rows done .. now - 1, and compares what the depths make of them."""
    reference = lab.reference
    works = [
        (
            sequence,
            reference.of(ids).hidden_TD[done:now],
            ids[sequence.rows + 1 : now + 1],
        )
        for _, ids, sequence, done, now in going
    ]
    found, logits = state.propose(works)
    for (number, ids, _, _, now), drafts, logits_KV in zip(going, found, logits, strict=True):
        with torch.no_grad():
            hidden_ND = reference.of(ids).hidden_TD[:now]
            chain = list(draft_chain(lab.model, hidden_ND, ids[1 : now + 1], state.depths))
        for depth, (_, wanted_1V) in enumerate(chain):
            lab.rows += 1
            place = f"depth {depth} of sequence {number} behind token {now}"
            if not torch.equal(
                reference.digest(logits_KV[depth : depth + 1]), reference.digest(wanted_1V)
            ):
                raise Mismatch(f"logits of {place}")
            if drafts[depth] != int(wanted_1V.argmax()):
                raise Mismatch(f"draft of {place}")
