"""As reference.py, row by row."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop


@loop
def combine_rows(y, inverse, weights, out):
    """What `moe_combine` returns, unrounded, written into `out`."""
    tokens, slots = weights.shape
    width = y.shape[1]
    for n in range(tokens):
        row = out[n]
        source, weight = y[inverse[n * slots]], weights[n, 0]
        for d in range(width):
            row[d] = weight * source[d]
        for j in range(1, slots):
            source, weight = y[inverse[n * slots + j]], weights[n, j]
            for d in range(width):
                row[d] += weight * source[d]


def moe_combine(
    y_MD: Tensor, inverse_M: Tensor, weights_NJ: Tensor, out_dtype: torch.dtype
) -> Tensor:
    y = array(exact.widen(y_MD).contiguous())
    out = empty(weights_NJ.shape[0], y.shape[1])
    combine_rows(y, array(inverse_M), exact.widened(weights_NJ), out)
    return tensor(out, out_dtype)
