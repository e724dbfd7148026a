"""The gradient of a matmul: two more products.

They are the library's, in fp32 for fp32 and bf16 alike (fp64 for fp64), and the gradient of a bf16
weight is never rounded to bf16 here. Saved: x and the weight, each only for the other's gradient.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import exact
from suzuri.kernels.matmul import matmul


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [I, J] @ b [J, K] with an fp32 accumulator, as fp32 (fp64 if one is), for backward code.

    On a GPU a bf16 `b` goes to the tensor cores. An fp32 `a` is then split into two bf16 parts,
    which keep 16 of its bits: a plain fp32 product takes ten times as long.
    """
    if not (a.is_cuda and b.dtype == torch.bfloat16 and a.dtype != torch.float64):
        wide = exact.at_least_fp32(torch.promote_types(a.dtype, b.dtype))
        return torch.matmul(a.to(wide), b.to(wide))
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    high = a.to(torch.bfloat16)
    low = (a - high).to(torch.bfloat16)
    parts = torch.mm(low, b, out_dtype=torch.float32)
    return parts.add_(torch.mm(high, b, out_dtype=torch.float32))


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_NK: Tensor, weight_MK: Tensor, scale: float, out_dtype: torch.dtype
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_NK if needs_weight else None, weight_MK if needs_x else None)
        ctx.scale, ctx.x_dtype = scale, x_NK.dtype
        return matmul(x_NK, weight_MK, scale=scale, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NM: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_NK, weight_MK = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight_MK is not None:
            grad_x = _scaled(product(grad_NM, weight_MK), ctx.scale).to(ctx.x_dtype)
        if x_NK is not None:
            grad_weight = _scaled(product(grad_NM.T, x_NK), ctx.scale)
        return grad_x, grad_weight, None, None


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x.mul_(scale)
