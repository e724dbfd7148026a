"""One matmul per expert over rows sorted by expert."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.grouped_gemm import reference


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """y[m] = x[m] @ weight[e]^T for offsets[e] <= m < offsets[e + 1].

    x_MK [M, K] sorted by expert (`moe_permute`), weight_EFK [E, F, K] of the same dtype, offsets_E1
    [E+1] int64 from 0 to M. Returns [M, F] in `out_dtype`: full K in fp32 (at least), one rounding,
    unweighted. A row's bits depend on the row and its expert alone. Gradients: x and weight.
    """
    if x_MK.shape[1] != weight_EFK.shape[2] or offsets_E1.shape[0] != weight_EFK.shape[0] + 1:
        raise ValueError(
            f"grouped_gemm: x {list(x_MK.shape)}, weight {list(weight_EFK.shape)}, "
            f"offsets {list(offsets_E1.shape)}"
        )
    if x_MK.dtype != weight_EFK.dtype:
        raise ValueError(f"grouped_gemm: x is {x_MK.dtype}, weight is {weight_EFK.dtype}")
    if exact.records_gradient(x_MK, weight_EFK) and not dispatch.is_forced():
        from suzuri.kernels.grouped_gemm import gradient

        return gradient.GroupedGemm.apply(x_MK, weight_EFK, offsets_E1, out_dtype)
    if dispatch.use_cpu(x_MK, weight_EFK):
        from suzuri.kernels.grouped_gemm import cpu

        return cpu.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
    if dispatch.use_reference(x_MK):
        return reference.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
    if x_MK.device.type != "cuda" or x_MK.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("grouped_gemm", x_MK)
    from suzuri.kernels.grouped_gemm import kernel

    return kernel.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
