"""As reference.py, row by row."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop
from suzuri.kernels.loops import exp


@loop
def _swiglu(gate_up, y):
    rows, width = y.shape
    for n in range(rows):
        gates, ups, row = gate_up[n][0::2], gate_up[n][1::2], y[n]
        for f in range(width):
            gate = gates[f]
            silu = gate / (np.float32(1.0) + np.float32(exp(-gate)))
            row[f] = silu * ups[f]


def swiglu(gate_up_NF2: Tensor, out_dtype: torch.dtype) -> Tensor:
    gate_up = array(exact.widen(gate_up_NF2).contiguous())
    doubled = gate_up.shape[-1]
    y = empty(*gate_up.shape[:-1], doubled // 2)
    _swiglu(gate_up.reshape(-1, doubled), y.reshape(-1, doubled // 2))
    return tensor(y, out_dtype)
