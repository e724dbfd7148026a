"""The gradient of RMSNorm. Saved: x and the weight; the statistics are computed again.

`_backward` is the formula, for fp64 and where nothing else runs; cpu.py and kernel.py have it too.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.rms_norm import rms_norm

Pair = tuple[Tensor | None, Tensor | None]


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps = eps
        return rms_norm(x_ND, weight_D, eps, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_ND, weight_D = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if dispatch.use_cpu(x_ND, weight_D) and x_ND.shape[-1]:
            from suzuri.kernels.rms_norm import cpu

            grads = cpu.rms_norm_backward(x_ND, weight_D, ctx.eps, grad_ND)
        elif not dispatch.use_reference(x_ND) and x_ND.dtype in dispatch.LOOP_DTYPES:
            from suzuri.kernels.rms_norm import kernel

            grads = kernel.rms_norm_backward(
                x_ND, weight_D, ctx.eps, grad_ND, needs_x=needs_x, needs_weight=needs_weight
            )
        else:
            grads = _backward(x_ND, weight_D, ctx.eps, grad_ND, ctx.needs_input_grad)
        grad_x, grad_weight = grads
        return grad_x if needs_x else None, grad_weight if needs_weight else None, None, None


def _backward(
    x_ND: Tensor, weight_D: Tensor, eps: float, grad_ND: Tensor, needs: tuple[bool, ...]
) -> Pair:
    """With n = x * r, r = rsqrt(mean(x^2) + eps), g = grad * weight: dx = r * (g - n * mean(g * n))
    and dweight = the sum over rows of grad * n."""
    wide_ND = exact.widen(x_ND)
    grad_ND = grad_ND.to(wide_ND.dtype)
    scale_N1 = torch.rsqrt((wide_ND * wide_ND).mean(-1, keepdim=True) + eps)
    normed_ND = wide_ND * scale_N1
    grad_x = grad_weight = None
    if needs[0]:
        inner_ND = grad_ND * weight_D.to(wide_ND.dtype)
        mean_N1 = (inner_ND * normed_ND).mean(-1, keepdim=True)
        grad_x = inner_ND.sub_(normed_ND * mean_N1).mul_(scale_N1).to(x_ND.dtype)
    if needs[1]:
        grad_weight = (grad_ND * normed_ND).flatten(0, -2).sum(0)
    return grad_x, grad_weight
