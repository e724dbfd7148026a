"""Head, chunked normaliser and the target's logit in one pass over the vocabulary."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import exact
from suzuri.kernels.log_softmax.reference import CHUNK, add_chunk, normalizer, start


def token_logprobs(
    h_ND: Tensor, unembed_VD: Tensor, targets_N: Tensor, scale: float, temperature_N: Tensor | None
) -> Tensor:
    exact.check_indices(targets_N, unembed_VD.shape[0], "target")
    wide = exact.at_least_fp32(h_ND.dtype)
    most, total = start(h_ND.to(wide))
    target_N = h_ND.new_zeros(h_ND.shape[0], dtype=wide)

    def chunk(h: Tensor, rows: Tensor, most: Tensor, total: Tensor, target: Tensor, begin: int):
        logits_NB = exact.accumulate(h, rows)
        if scale != 1.0:
            logits_NB = logits_NB * scale
        if temperature_N is not None:
            logits_NB = logits_NB / temperature_N.to(wide)[:, None]
        most, total = add_chunk((most, total), logits_NB)
        inside_N = (targets_N >= begin) & (targets_N < begin + rows.shape[0])
        column_N = (targets_N - begin).clamp(0, rows.shape[0] - 1)
        own_N = exact.select(logits_NB, column_N[:, None])[:, 0]
        return most, total, torch.where(inside_N, own_N, target)

    # One split, not a slice per chunk: the backward of each slice would be a whole weight of zeros.
    for number, rows_BD in enumerate(unembed_VD.split(CHUNK)):
        # Recomputed in the backward: a chunk's logits never outlive the chunk.
        most, total, target_N = checkpoint(
            chunk, h_ND, rows_BD, most, total, target_N, number * CHUNK, use_reentrant=False
        )
    return target_N - normalizer((most, total))
