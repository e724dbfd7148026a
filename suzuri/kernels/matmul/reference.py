"""Plain PyTorch matmul under the contract; see suzuri/kernels/exact.py for how the sum is taken."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def matmul(x_NK: Tensor, weight_MK: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    y_NM = exact.accumulate(x_NK, weight_MK)
    if scale != 1.0:
        y_NM = y_NM * scale
    return y_NM.to(out_dtype)
