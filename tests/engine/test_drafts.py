"""Draft depths through their caches: at every step the drafts of a run from the start."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from suzuri.engine.drafts import DraftSequence, DraftState
from suzuri.model.batch import pack
from suzuri.model.inkling import Inkling
from suzuri.tools.golden import draft_chain
from tests.model.models import golden_model, random_ids, random_model


def models() -> dict[str, Callable[[], Inkling]]:
    return {
        "tiny": random_model,
        "tiny bf16": lambda: random_model(dtype=torch.bfloat16),
        **{case: lambda case=case: golden_model(case) for case in ("base", "chain", "odd", "wide")},
    }


def state(model: Inkling, slots: int = 3) -> DraftState:
    return DraftState(
        model, page_size=4, pages={"global": 60, "local": 60}, slots=slots, snapshots=1
    )


def hidden_rows(model: Inkling, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model.decoder(pack([ids]))


def from_the_start(model: Inkling, ids: list[int]) -> tuple[list[int], list[Tensor]]:
    """Drafts after these tokens, by a run of all rows without a cache."""
    assert model.draft is not None
    hidden_ND = hidden_rows(model, ids)[:-1]
    with torch.no_grad():
        chain = draft_chain(model, hidden_ND, ids[1:], len(model.draft.depths))
        logits = [logits_1V[0] for _, logits_1V in chain]
    return [int(row.argmax()) for row in logits], logits


def step(
    drafts: DraftState, sequence: DraftSequence, rows: Tensor, ids: list[int], done: int, now: int
) -> tuple[list[int], Tensor]:
    """Gives rows done .. now - 1 (token `now` is known too)."""
    first = sequence.rows
    (found,), (logits,) = drafts.propose([(sequence, rows[done:now], ids[first + 1 : now + 1])])
    return found, logits


@pytest.mark.parametrize("name", models())
def test_drafts_of_every_step_equal_a_run_from_the_start(name: str) -> None:
    model = models()[name]()
    ids = random_ids(model, 25, seed=3)
    rows = hidden_rows(model, ids)
    drafts = state(model)
    sequence = drafts.open(1)
    done = 0
    for now in (1, 2, 9, 10, 11, 12, 17, 18, 24):
        found, logits = step(drafts, sequence, rows, ids, done, now)
        expected, expected_logits = from_the_start(model, ids[: now + 1])
        assert found == expected
        assert torch.equal(logits, torch.stack(expected_logits))
        done = now
    drafts.close(sequence)
    assert all(pool.used == 0 for pool in drafts.pools.values())


def test_c11_a_prompt_of_one_token() -> None:
    model = random_model()
    ids = random_ids(model, 2, seed=4)
    drafts = state(model)
    found, _ = step(drafts, drafts.open(1), hidden_rows(model, ids), ids, 0, 1)
    assert found == from_the_start(model, ids)[0]


def test_sequences_together_equal_each_alone() -> None:
    model = random_model()
    drafts = state(model)
    lists = [random_ids(model, count, seed=count) for count in (9, 4)]
    rows = [hidden_rows(model, ids) for ids in lists]
    sequences = [drafts.open(1), drafts.open(2)]
    for now in ((3, 1), (4, 2), (8, 3)):
        works = [
            (
                s,
                row[(0 if s.hidden_TD is None else s.rows + s.hidden_TD.shape[0]) : n],
                ids[s.rows + 1 : n + 1],
            )
            for s, row, ids, n in zip(sequences, rows, lists, now, strict=True)
        ]
        found, _ = drafts.propose(works)
        assert found == [
            from_the_start(model, ids[: n + 1])[0] for ids, n in zip(lists, now, strict=True)
        ]


@pytest.mark.parametrize("fault", ["stale rows kept", "ring without room"])
def test_draft_state_that_is_not_rolled_back_is_seen(fault: str) -> None:
    model = random_model()
    ids = random_ids(model, 25, seed=5)
    rows = hidden_rows(model, ids)
    drafts = state(model)
    if fault == "ring without room":
        drafts.cache.ring = model.config.text.sconv_kernel_size - 1
        drafts.cache.layers = [
            type(layer)(
                k_pages_PTUC=layer.k_pages_PTUC,
                v_pages_PTUC=layer.v_pages_PTUC,
                kv_conv_LRC=layer.kv_conv_LRC[:, : drafts.cache.ring].clone(),
                attn_conv_LRC=layer.attn_conv_LRC[:, : drafts.cache.ring].clone(),
                mlp_conv_LRC=layer.mlp_conv_LRC[:, : drafts.cache.ring].clone(),
            )
            for layer in drafts.cache.layers
        ]
    sequence = drafts.open(1)
    done, wrong = 0, 0
    for now in range(1, 25):
        if fault == "stale rows kept" and sequence.hidden_TD is not None:
            sequence.rows += sequence.hidden_TD.shape[0]
            sequence.hidden_TD = None
        _, logits = step(drafts, sequence, rows, ids, done, now)
        _, expected = from_the_start(model, ids[: now + 1])
        wrong += not torch.equal(logits, torch.stack(expected))
        done = now
    assert wrong > 10
