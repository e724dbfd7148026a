"""What rows ask of their draw."""

from typing import NamedTuple

from torch import Tensor


class Draws(NamedTuple):
    """Of N rows: temperature_N fp32 >= 0, where 0 is the most likely id without noise; seeds_N,
    positions_N, sample_index_N int64 as in `sample_tokens`."""

    temperature_N: Tensor
    seeds_N: Tensor
    positions_N: Tensor
    sample_index_N: Tensor
