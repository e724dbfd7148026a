"""As reference.py and gradient.py, row by row."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread
from suzuri.kernels.loops import norm_row


@loop
def _norm(x, weight, eps, y, first, last):
    squares = np.empty(x.shape[1], np.float32)
    for n in range(first, last):
        norm_row(x[n], weight, eps, squares, y[n])


NARROW = 64
"""Widest rows of which BLOCK are normed at once."""
BLOCK = 64


@loop
def _norm_narrow(x, weight, eps, y, begin, stop):
    """As _norm: the same tree for every row, side by side for many rows, which vectorises."""
    width = x.shape[1]
    squares, scales = np.empty((width, BLOCK), np.float32), np.empty(BLOCK, np.float32)
    squares[:] = 0.0
    top = 1
    while top * 2 < width:
        top *= 2
    for first in range(begin, stop, BLOCK):
        count = min(BLOCK, stop - first)
        for r in range(count):
            row = x[first + r]
            for d in range(width):
                squares[d, r] = row[d] * row[d]
        half, end = top, width
        while half:
            for d in range(half, end):
                lower, upper = squares[d - half], squares[d]
                for r in range(BLOCK):
                    lower[r] += upper[r]
            half, end = half // 2, half
        for r in range(BLOCK):
            mean = squares[0, r] / np.float32(width)
            scales[r] = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for r in range(count):
            row, out, scale = x[first + r], y[first + r], scales[r]
            for d in range(width):
                out[d] = row[d] * scale * weight[d]


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    x = array(exact.widen(x_ND).contiguous())
    y = empty(*x.shape)
    rows = (-1, x.shape[-1])
    run = _norm_narrow if x.shape[-1] <= NARROW else _norm
    given = (x.reshape(rows), exact.widened(weight_D), eps, y.reshape(rows))
    spread(6 * x.size, len(given[0]), lambda first, last: run(*given, first, last))
    return tensor(y, out_dtype)


def _norm_backward(x, weight, grad, eps, grad_x, grad_weight, first, last):
    """See gradient.py; parts `first` to `last` of the rows, each with a grad_weight of its own."""
    rows, width = x.shape
    parts = grad_weight.shape[0]
    for part in range(first, last):
        total = grad_weight[part]
        for n in range(rows * part // parts, rows * (part + 1) // parts):
            row, given, y = x[n], grad[n], grad_x[n]
            squares, product = np.float32(0), np.float32(0)
            for d in range(width):
                squares += row[d] * row[d]
                product += row[d] * (given[d] * weight[d])
            scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
            factor = product / np.float32(width) * scale * scale
            for d in range(width):
                total[d] += given[d] * (row[d] * scale)
                y[d] = (given[d] * weight[d] - row[d] * factor) * scale


norm_backward = loop(_norm_backward, reordered=True)

PARTS = 8
"""Partial sums of the weight's gradient, however many threads there are."""


def rms_norm_backward(
    x_ND: Tensor, weight_D: Tensor, eps: float, grad_ND: Tensor
) -> tuple[Tensor, Tensor]:
    x, grad = array(exact.widen(x_ND).contiguous()), array(exact.widen(grad_ND).contiguous())
    weight, grad_x = exact.widened(weight_D), empty(*x.shape)
    parts = np.zeros((PARTS, x.shape[-1]), np.float64)
    rows = (-1, x.shape[-1])
    given = (x.reshape(rows), weight, grad.reshape(rows), eps, grad_x.reshape(rows), parts)
    spread(6 * x.size, PARTS, lambda first, last: norm_backward(*given, first, last))
    grad_weight = exact.tree_sum(torch.from_numpy(parts).T).to(torch.float32)
    return tensor(grad_x, x_ND.dtype), grad_weight
