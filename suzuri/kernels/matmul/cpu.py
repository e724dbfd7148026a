"""As reference.py."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.loops import multiply


def matmul(x_NK: Tensor, weight_MK: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    x, weight = array(exact.widen(x_NK).contiguous()), exact.transposed(weight_MK)
    y = empty(x.shape[0], weight.shape[1])
    multiply(x, weight, y)
    y_NM = tensor(y)
    return (y_NM if scale == 1.0 else y_NM * scale).to(out_dtype)
