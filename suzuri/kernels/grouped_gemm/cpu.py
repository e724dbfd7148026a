"""As reference.py, all experts in one library call where their numbers of rows are alike.

The rows of each expert are padded to the longest with rows that nobody reads.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, tensor
from suzuri.kernels.grouped_gemm import reference
from suzuri.kernels.kept import kept

MOST_WASTED_ROWS = 1 << 12
MOST_WASTED = 1 << 22
"""Multiplications with rows that nobody reads, up to which one call is quicker than a loop."""


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
) -> Tensor:
    experts, out, k = weight_EFK.shape
    layout = kept(_layout, offsets_E1)
    if layout is None or layout.wasted_rows * out * k > MOST_WASTED:
        return reference.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
    x_ETK = exact.take_rows(x_MK, layout.source_X).reshape(experts, -1, k)
    y_XF = exact.accumulate(x_ETK, weight_EFK).flatten(0, 1)
    return exact.take_rows(y_XF, layout.target_M).to(out_dtype)


class _Layout(NamedTuple):
    """T rows for each expert: source_X [E * T] is the sorted row behind each of them (any, where
    there is none), target_M [M] the other way round."""

    wasted_rows: int
    source_X: Tensor
    target_M: Tensor


def _layout(offsets_E1: Tensor) -> _Layout | None:
    """None where there is nothing to do or too much to waste."""
    offsets = array(offsets_E1)
    counts = offsets[1:] - offsets[:-1]
    experts, num_rows = len(counts), int(offsets[-1])
    longest = int(np.amax(counts)) if experts else 0
    padded = -(-longest // exact.ROW_PAD) * exact.ROW_PAD
    wasted = experts * padded - num_rows
    if not num_rows or wasted > MOST_WASTED_ROWS:
        return None
    rows_M = np.arange(num_rows)
    target_M = rows_M + (padded * np.arange(experts) - offsets[:-1]).repeat(counts)
    source_X = np.zeros(experts * padded, np.int64)
    source_X[target_M] = rows_M
    return _Layout(wasted, tensor(source_X), tensor(target_M))
