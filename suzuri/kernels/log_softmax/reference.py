"""The chunked normaliser; `chunk_stats` and `fold` are shared with token_logprobs."""

import torch
from torch import Tensor

from suzuri.kernels import exact

CHUNK = exact.COLUMNS_PER_CALL


def log_softmax(logits_NV: Tensor) -> Tensor:
    logits_NV = exact.widen(logits_NV)
    state = start(logits_NV)
    for begin in range(0, logits_NV.shape[1], CHUNK):
        chunk_max, chunk_sum, _ = chunk_stats(logits_NV[:, begin : begin + CHUNK])
        state = fold(state, chunk_max, chunk_sum)
    return logits_NV - normalizer(state)[:, None]


def start(like_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The empty fold: (max [N], sum of exp(x - max) [N])."""
    rows = like_NV.shape[0]
    return like_NV.new_full((rows,), _empty_max(like_NV)), like_NV.new_zeros(rows)


def _empty_max(like_NV: Tensor) -> float:
    """The max of nothing: finite, so that exp(-inf - max) is 0 and not NaN, never above a logit."""
    return torch.finfo(like_NV.dtype).min


def chunk_stats(chunk_NB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one vocabulary chunk: the max, the sum of exp(x - max), and these exponentials. The max
    carries no gradient: it cancels."""
    chunk_max = chunk_NB.detach().amax(-1).clamp(min=_empty_max(chunk_NB))
    share_NB = exact.exp(chunk_NB - chunk_max[:, None])
    return chunk_max, exact.tree_sum(share_NB), share_NB


def fold(
    state: tuple[Tensor, Tensor], chunk_max: Tensor, chunk_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Folds the next vocabulary chunk into (max, sum)."""
    old_max, total = state
    new_max = torch.maximum(old_max, chunk_max)
    total = total * exact.exp(old_max - new_max) + chunk_sum * exact.exp(chunk_max - new_max)
    return new_max, total


def normalizer(state: tuple[Tensor, Tensor]) -> Tensor:
    """log of the sum of exp over all folded chunks, [N]."""
    return state[0] + torch.log(state[1])
