"""As reference.py and gradient.py, in one call for all experts."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread
from suzuri.kernels.gradient_products import columns_times, rows_times
from suzuri.kernels.loops import products

LOT = 32
"""Rows of a part that a thread takes: experts have very different numbers of them."""


@loop
def _products(x, w, offsets, y, first, last):
    """y[m] = x[m] @ w[e] for offsets[e] <= m < offsets[e + 1], rows `first` to `last` - 1."""
    for e in range(w.shape[0]):
        low, high = max(offsets[e], first), min(offsets[e + 1], last)
        if high > low:
            products(x[low:high], w[e], y[low:high], 0, w.shape[2])


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
) -> Tensor:
    width, k = weight_EFK.shape[1:]
    x, w, offsets = (
        array(exact.widen(x_MK).contiguous()),
        exact.transposed(weight_EFK),
        array(offsets_E1),
    )
    rows = x.shape[0]
    y = empty(rows, width)

    def run(first: int, last: int) -> None:
        _products(x, w, offsets, y, LOT * first, min(LOT * last, rows))

    spread(y.size * k, -(-rows // LOT), run)
    y[offsets[-1] :] = 0.0
    return tensor(y, out_dtype)


@loop
def _of_inputs(grad, w, offsets, y, first, last):
    for e in range(w.shape[0]):
        low, high = max(offsets[e], first), min(offsets[e + 1], last)
        if high > low:
            rows_times(grad[low:high], w[e], y[low:high])


def of_inputs(grad_MF: Tensor, weight_EFK: Tensor, offsets_E1: Tensor) -> Tensor:
    grad, w = (array(exact.widen(x).contiguous()) for x in (grad_MF, weight_EFK))
    rows, offsets = grad.shape[0], array(offsets_E1)
    y = empty(rows, w.shape[2])

    def run(first: int, last: int) -> None:
        _of_inputs(grad, w, offsets, y, LOT * first, min(LOT * last, rows))

    spread(y.size * w.shape[1], -(-rows // LOT), run)
    return tensor(y)


@loop
def _of_weights(grad, x, offsets, y, first, last):
    """Rows `first` to `last` - 1 of every expert's."""
    for e in range(y.shape[0]):
        low, high = offsets[e], offsets[e + 1]
        if high > low:
            columns_times(grad[low:high], x[low:high], y[e], first, last)
        else:
            y[e, first:last] = 0.0


def of_weights(grad_MF: Tensor, x_MK: Tensor, offsets_E1: Tensor) -> Tensor:
    grad, x = (array(exact.widen(x).contiguous()) for x in (grad_MF, x_MK))
    given, rows = (grad, x, array(offsets_E1)), grad.shape[1]
    y = empty(offsets_E1.shape[0] - 1, rows, x.shape[1])

    def run(first: int, last: int) -> None:
        _of_weights(*given, y, 4 * first, min(4 * last, rows))

    spread(grad.size * x.shape[1], -(-rows // 4), run)
    return tensor(y)
