"""As reference.py and gradient.py, row by row."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread
from suzuri.kernels.loops import exp, swiglu_row

WORK = 40
"""Of one hidden unit, in multiplications."""


@loop
def _swiglu(gate_up, y, first, last):
    for n in range(first, last):
        swiglu_row(gate_up[n], y[n])


def swiglu(gate_up_NF2: Tensor, out_dtype: torch.dtype) -> Tensor:
    gate_up = array(exact.widen(gate_up_NF2).contiguous())
    doubled = gate_up.shape[-1]
    y = empty(*gate_up.shape[:-1], doubled // 2)
    rows, out = gate_up.reshape(-1, doubled), y.reshape(-1, doubled // 2)
    spread(WORK * y.size, len(rows), lambda first, last: _swiglu(rows, out, first, last))
    return tensor(y, out_dtype)


@loop
def _swiglu_backward(gate_up, grad, out, first, last):
    """See gradient.py. The exponentials are taken of a contiguous row: those vectorise."""
    hidden, one = grad.shape[1], np.float32(1.0)
    gates, sigmoids = np.empty(hidden, np.float32), np.empty(hidden, np.float32)
    for n in range(first, last):
        row, given, y = gate_up[n], grad[n], out[n]
        for f in range(hidden):
            gates[f] = row[2 * f]
        for f in range(hidden):
            sigmoids[f] = one / (one + np.float32(exp(-gates[f])))
        for f in range(hidden):
            scaled = given[f] * sigmoids[f]
            y[2 * f] = scaled * (one + gates[f] * (one - sigmoids[f])) * row[2 * f + 1]
            y[2 * f + 1] = scaled * gates[f]


def swiglu_backward(gate_up_NF2: Tensor, grad_NF: Tensor) -> Tensor:
    gate_up = array(exact.widen(gate_up_NF2).contiguous())
    grad = array(exact.widen(grad_NF).contiguous())
    out = empty(*gate_up.shape)
    x, dy, dx = (a.reshape(-1, a.shape[-1]) for a in (gate_up, grad, out))
    spread(WORK * dy.size, len(x), lambda first, last: _swiglu_backward(x, dy, dx, first, last))
    return tensor(out, gate_up_NF2.dtype)
