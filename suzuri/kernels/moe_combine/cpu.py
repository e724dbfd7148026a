"""As reference.py, row by row."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread

WORK = 6
"""Of one number of a slot, in multiplications: it comes from far away."""


@loop
def combine_rows(y, inverse, weights, out, first, last):
    """What `moe_combine` returns, unrounded, for tokens `first` to `last`, written into `out`."""
    slots, width = weights.shape[1], y.shape[1]
    for n in range(first, last):
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
    given = (y, array(inverse_M), exact.widened(weights_NJ), out)
    spread(WORK * y.size, len(out), lambda first, last: combine_rows(*given, first, last))
    return tensor(out, out_dtype)
