"""Gumbel argmax (Gumbel, 1954; Maddison et al., 2014) by the formula of the contract."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.philox import philox

SERIES_BELOW = 2.0**-10
LEAST_SURVIVAL = 2.0**-25
"""1 - u rounds to 0 for the last few words; their noise is the worst possible either way."""


def sample_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sample_index_N: Tensor,
    purpose: int,
) -> Tensor:
    logits_NV = exact.widen(logits_NV)
    noise_NV = gumbel(seeds_N, positions_N, sample_index_N, purpose, logits_NV.shape[1]).to(
        logits_NV.dtype
    )
    greedy_N = temperature_N <= 0
    divisor_N = torch.where(greedy_N, 1.0, temperature_N).to(logits_NV.dtype)
    score_NV = logits_NV / divisor_N[:, None] + torch.where(greedy_N[:, None], 0.0, noise_NV)
    return first_argmax(score_NV)


def gumbel(
    seeds_N: Tensor,
    positions_N: Tensor,
    sample_index_N: Tensor,
    purpose: int,
    vocabulary: int,
    *,
    first: int = 0,
) -> Tensor:
    """Standard Gumbel noise [N, V] fp32 of the ids from `first`, a multiple of 4, on; that of id v
    depends on row n's counters and v alone."""
    blocks_1B = first // 4 + torch.arange(-(-vocabulary // 4), device=seeds_N.device)[None]
    words = philox(
        seeds_N[:, None],
        positions_N[:, None],
        blocks_1B,
        torch.full_like(blocks_1B[:, :1], purpose),
        sample_index_N[:, None],
    )
    word_NV = torch.stack(words, -1).flatten(1)[:, :vocabulary]
    u_NV = (word_NV.to(torch.float32) + 0.5) * 2.0**-32
    series_NV = u_NV * (1 + u_NV * (0.5 + u_NV * (1 / 3)))
    exact_NV = -torch.log((1 - u_NV).clamp(min=LEAST_SURVIVAL))
    return -torch.log(torch.where(u_NV < SERIES_BELOW, series_NV, exact_NV))


def first_argmax(x_NV: Tensor) -> Tensor:
    """Index of the largest element of each row, the lowest one on ties; -1 if it is NaN or -inf."""
    most_N1 = x_NV.amax(-1, keepdim=True)
    index_V = torch.arange(x_NV.shape[1], device=x_NV.device)
    first_N = torch.where(x_NV == most_N1, index_V, x_NV.shape[1]).amin(-1)
    return torch.where(most_N1[:, 0] > float("-inf"), first_N, -1)
