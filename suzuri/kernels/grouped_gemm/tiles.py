"""Which tiles a grouped product takes."""

from typing import NamedTuple

import torch

from suzuri.kernels.matmul.kernel import Tile


class Schedule(NamedTuple):
    """How a grouped product is cut up and in what order; no bit depends on it."""

    tile: Tile
    group: int = 8
    """Row tiles of an expert whose columns are walked together."""
    persistent: bool = False
    """One program per multiprocessor walks over the tiles (by descriptors, not swapped)."""


def schedule_for(rows: int, experts: int, dtype: torch.dtype, *, swiglu: bool = False) -> Schedule:
    """The schedule for `rows` over `experts`: what fits their mean number of rows
    (measured on an H200: benchmarks/results/kernels-matmul.json)."""
    mean = rows / experts
    if dtype == torch.float32:
        if mean <= 16:
            return Schedule(Tile(16, 64, 32, 4, 2, True), 1)
        return Schedule(Tile(64, 64, 32, 4, 2))
    if mean <= 1.5:
        return Schedule(Tile(16, 64, 128, 4, 4, True), 1)
    if mean <= 6:
        return Schedule(Tile(32, 64, 128, 4, 3, True, True), 1)
    if mean <= 96:
        return Schedule(Tile(64, 128, 64, 4, 4, False, True))
    if mean <= 160:
        return Schedule(Tile(128, 128, 64, 4, 4, False, True))
    return Schedule(Tile(128, 256, 64, 8, 3, False, True))
