"""y = (x @ weight^T) * scale, fp32 accumulator, one rounding."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.matmul import reference


def matmul(
    x_NK: Tensor, weight_MK: Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiplies packed rows by a weight stored [out, in].

    x_NK [N, K], weight_MK [M, K], one floating dtype. Returns [N, M] in `out_dtype` (default: that
    of x). Accumulates in fp32 (at least); `scale` multiplies the accumulator before the single
    rounding. A row's bits do not depend on N. Gradients: x and weight.
    """
    if x_NK.shape[-1] != weight_MK.shape[-1] or x_NK.dim() != 2 or weight_MK.dim() != 2:
        raise ValueError(
            f"matmul: x {list(x_NK.shape)}, weight {list(weight_MK.shape)}; need [N, K], [M, K]"
        )
    if x_NK.dtype != weight_MK.dtype:
        raise ValueError(f"matmul: x is {x_NK.dtype}, weight is {weight_MK.dtype}; need one dtype")
    if exact.records_gradient(x_NK, weight_MK) and not dispatch.is_forced():
        from suzuri.kernels.matmul import gradient

        return gradient.Matmul.apply(x_NK, weight_MK, scale, out_dtype or x_NK.dtype)
    if dispatch.use_cpu(x_NK, weight_MK):
        from suzuri.kernels.matmul import cpu

        return cpu.matmul(x_NK, weight_MK, scale, out_dtype or x_NK.dtype)
    if dispatch.use_reference(x_NK):
        return reference.matmul(x_NK, weight_MK, scale, out_dtype or x_NK.dtype)
    if x_NK.device.type != "cuda" or x_NK.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("matmul", x_NK)
    from suzuri.kernels.matmul import kernel

    return kernel.matmul(x_NK, weight_MK, scale, out_dtype or x_NK.dtype)
