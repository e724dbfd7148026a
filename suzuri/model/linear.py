"""The two leaf modules with a weight: a linear map and a norm."""

import torch
from torch import Tensor, nn

from suzuri.kernels.matmul import matmul
from suzuri.kernels.rms_norm import rms_norm


class Linear(nn.Module):
    """y = x @ weight^T * scale, weight [out, in], no bias (the family has none)."""

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype))

    def forward(
        self, x_ND: Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return matmul(x_ND, self.weight, scale=scale, out_dtype=out_dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim with a plain weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x_ND: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return rms_norm(x_ND, self.weight, self.eps, out_dtype=out_dtype)
