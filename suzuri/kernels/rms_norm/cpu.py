"""As reference.py, row by row."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop
from suzuri.kernels.loops import tree


@loop
def _norm(x, weight, eps, y):
    rows, width = x.shape
    squares = np.empty(width, np.float32)
    for n in range(rows):
        for i in range(width):
            squares[i] = x[n, i] * x[n, i]
        mean = tree(squares, width) / np.float32(width)
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for i in range(width):
            y[n, i] = x[n, i] * scale * weight[i]


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    x = array(exact.widen(x_ND).contiguous())
    y = empty(*x.shape)
    rows = (-1, x.shape[-1])
    _norm(x.reshape(rows), exact.widened(weight_D), eps, y.reshape(rows))
    return tensor(y, out_dtype)
