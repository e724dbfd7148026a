"""As reference.py, row by row."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop
from suzuri.kernels.loops import swiglu_row


@loop
def _swiglu(gate_up, y):
    for n in range(y.shape[0]):
        swiglu_row(gate_up[n], y[n])


def swiglu(gate_up_NF2: Tensor, out_dtype: torch.dtype) -> Tensor:
    gate_up = array(exact.widen(gate_up_NF2).contiguous())
    doubled = gate_up.shape[-1]
    y = empty(*gate_up.shape[:-1], doubled // 2)
    _swiglu(gate_up.reshape(-1, doubled), y.reshape(-1, doubled // 2))
    return tensor(y, out_dtype)
