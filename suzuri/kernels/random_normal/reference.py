"""Philox words, cut in halves, through a table of quantiles."""

import functools
import statistics

import torch
from torch import Tensor

from suzuri.kernels.philox.reference import philox

PER_BLOCK = 8
STEPS = 1 << 14
"""Quantiles are multiples of 1 / STEPS, so that no platform's logarithm shows in them."""


@functools.cache
def quantiles() -> tuple[float, ...]:
    """The normal quantiles at (i + 1/2) / 2^16, i = 0 .. 2^16 - 1."""
    inverse = statistics.NormalDist().inv_cdf  # exact: Python numbers, rounded below
    upper = [round(inverse((i + 0.5) / 65536) * STEPS) / STEPS for i in range(32768, 65536)]
    return (*(-value for value in reversed(upper)), *upper)


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(quantiles(), dtype=torch.float32, device=device)


def random_normal(seed: Tensor, stream: int, first: int, count: int) -> Tensor:
    begin, end = first // PER_BLOCK, -(-(first + count) // PER_BLOCK)
    block = torch.arange(begin, end, device=seed.device)
    zero = torch.zeros_like(seed)
    words = philox(seed, block & 0xFFFFFFFF, block >> 32, zero + stream, zero)
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    skip = first - begin * PER_BLOCK
    return _table(seed.device)[halves.flatten()][skip : skip + count]
