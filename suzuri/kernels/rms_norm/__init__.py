"""Root-mean-square norm over the last dim."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.rms_norm import reference


def rms_norm(
    x_ND: Tensor, weight_D: Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * weight, statistics and products in fp32, one rounding.

    x_ND [..., D], weight_D [D] (plain weight, not 1 + w). Returns the shape of x in `out_dtype`
    (default: that of x). The mean is a fixed tree. Gradients: x and weight.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if x_ND.shape[-1] != weight_D.shape[0]:
        raise ValueError(f"rms_norm: x {list(x_ND.shape)} against weight {list(weight_D.shape)}")
    if exact.records_gradient(x_ND, weight_D) and not dispatch.is_forced():
        from suzuri.kernels.rms_norm import gradient

        return gradient.RMSNorm.apply(x_ND, weight_D, eps, out_dtype or x_ND.dtype)
    if dispatch.use_cpu(x_ND, weight_D) and 0 < x_ND.shape[-1] <= exact.FOLD:
        from suzuri.kernels.rms_norm import cpu

        return cpu.rms_norm(x_ND, weight_D, eps, out_dtype or x_ND.dtype)
    if dispatch.use_reference(x_ND):
        return reference.rms_norm(x_ND, weight_D, eps, out_dtype or x_ND.dtype)
    if x_ND.device.type != "cuda":
        raise dispatch.no_kernel("rms_norm", x_ND)
    from suzuri.kernels.rms_norm import kernel

    return kernel.rms_norm(x_ND, weight_D, eps, out_dtype or x_ND.dtype)
