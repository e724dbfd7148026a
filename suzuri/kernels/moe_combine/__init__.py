"""Weighted sum of each token's expert outputs, in slot order."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.moe_combine import reference
from suzuri.kernels.moe_permute import Permutation


def moe_combine(
    y_MD: Tensor, permutation: Permutation, weights_NJ: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """out[n] = sum_j weights[n, j] * y[slot (n, j)], j ascending, in fp32 (at least), one rounding.

    y_MD [N * J, D]: rounded, unweighted slot outputs sorted by expert; weights_NJ [N, J] fp32,
    routed slots in ascending expert id, then the shared ones. Returns [N, D] in `out_dtype`.
    Gradients: y and weights.
    """
    if y_MD.shape[0] != weights_NJ.numel():
        raise ValueError(f"moe_combine: {y_MD.shape[0]} rows for {list(weights_NJ.shape)} slots")
    if exact.records_gradient(y_MD, weights_NJ) and not dispatch.is_forced():
        from suzuri.kernels.moe_combine import gradient

        return gradient.MoeCombine.apply(y_MD, *permutation, weights_NJ, out_dtype)
    if dispatch.use_cpu(y_MD, weights_NJ):
        from suzuri.kernels.moe_combine import cpu

        return cpu.moe_combine(y_MD, permutation.inverse_M, weights_NJ, out_dtype)
    if dispatch.use_reference(y_MD):
        return reference.moe_combine(
            y_MD, permutation.order_M, permutation.inverse_M, weights_NJ, out_dtype
        )
    if y_MD.device.type != "cuda" or y_MD.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("moe_combine", y_MD)
    from suzuri.kernels.moe_combine import kernel

    return kernel.moe_combine(y_MD, permutation.inverse_M, weights_NJ, out_dtype)
