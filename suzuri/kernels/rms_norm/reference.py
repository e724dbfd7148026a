"""RMSNorm with one rounding (the product with the weight happens before it)."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    wide_ND = exact.widen(x_ND)
    mean_N = exact.tree_sum(wide_ND * wide_ND) / x_ND.shape[-1]
    y_ND = wide_ND * torch.rsqrt(mean_N + eps)[..., None] * weight_D.to(wide_ND.dtype)
    return y_ND.to(out_dtype)
