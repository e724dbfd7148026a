"""How many draft tokens greedy decoding would accept, from the model's own outputs."""

from collections.abc import Sequence

import torch

from suzuri.model.batch import pack
from suzuri.model.inkling import Inkling


def accepted_lengths(model: Inkling, rows: Sequence[int], start: int) -> list[int]:
    """Of each place from `start` on: how many draft depths in a row say what greedy decoding said.

    `rows`: a prompt and the greedy answer behind it, in model rows; `start`: where the answer
    begins. A draft is made behind a token that was just decided, depth 0 guessing the one after the
    next; a depth counts only if all before it were right, so what it reads is what it would have
    read. Places whose depths reach beyond the end are left out.
    """
    draft, depths = model.draft, model.config.mtp.num_nextn_predict_layers
    if draft is None:
        raise ValueError("this model has no draft depths")
    device = model.decoder.norm.weight.device
    tokens = torch.tensor(list(rows), device=device)
    count = len(rows)
    last = count - depths - 1
    if last <= start - 1:
        return []
    right: list[torch.Tensor] = []
    with torch.no_grad():
        batch = pack([list(rows)], device=device)
        hidden_ND, embedded_ND = model.decoder(batch), model.decoder.embedded(batch)
        for depth_MD, read_M in draft.over_known_tokens(hidden_ND, embedded_ND, [count]):
            # A row guesses the token after the one that it read; nothing follows the last.
            guess_M = model.decoder.logits(depth_MD).argmax(-1)
            right.append(guess_M[:-1] == tokens[read_M[:-1] + 1])
    # Behind the token at place p (p >= start - 1 is the last of the prompt): rows p of every depth.
    found: list[int] = []
    for place in range(start - 1, last):
        length = 0
        for depth in range(depths):
            if not bool(right[depth][place]):
                break
            length += 1
        found.append(length)
    return found
