"""The gradient of the short convolution without state. Saved: x, the weight and the layout.

`_backward` is the formula, for fp64 and where nothing else runs; cpu.py and kernel.py have it too.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.short_conv import short_conv

Grads = tuple[Tensor | None, Tensor | None]


class ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_NC: Tensor,
        weight_CK: Tensor,
        positions_N: Tensor,
        seq_ids_N: Tensor,
        seq_starts_S1: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_NC, weight_CK, seq_ids_N, seq_starts_S1)
        return short_conv(x_NC, weight_CK, positions_N, seq_ids_N, seq_starts_S1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NC: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_NC, weight_CK, seq_ids_N, seq_starts_S1 = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if dispatch.use_cpu(x_NC, weight_CK):
            from suzuri.kernels.short_conv import cpu

            grads = cpu.short_conv_backward(x_NC, weight_CK, seq_ids_N, seq_starts_S1, grad_NC)
        elif not dispatch.use_reference(x_NC) and x_NC.dtype in dispatch.LOOP_DTYPES:
            from suzuri.kernels.short_conv import kernel

            layout = (seq_ids_N, seq_starts_S1)
            grads = kernel.short_conv_backward(
                x_NC, weight_CK, *layout, grad_NC, needs_x=needs_x, needs_weight=needs_weight
            )
        else:
            index_N = torch.arange(x_NC.shape[0], device=x_NC.device) - seq_starts_S1[seq_ids_N]
            grads = _backward(x_NC, weight_CK, index_N, grad_NC, needs_weight)
        grad_x, grad_weight = grads
        return grad_x if needs_x else None, grad_weight if needs_weight else None, None, None, None


def _backward(
    x_NC: Tensor, weight_CK: Tensor, index_N: Tensor, grad_NC: Tensor, needs_weight: bool
) -> Grads:
    """Tap by tap: row n was the input of row n + back if that has as many rows before it."""
    wide_NC, weight_CK = exact.widen(x_NC), exact.widen(weight_CK)
    grad_NC = grad_NC.to(wide_NC.dtype)
    num_rows, taps = x_NC.shape[0], weight_CK.shape[1]
    grad_x = grad_NC.clone()
    grad_weight = torch.zeros_like(weight_CK) if needs_weight else None
    for back in range(min(taps, num_rows)):
        tap = taps - 1 - back
        inside_M1 = (index_N[back:] >= back)[:, None]
        later_MC = grad_NC[back:].masked_fill(~inside_M1, 0.0)
        grad_x[: num_rows - back].addcmul_(later_MC, weight_CK[:, tap])
        if grad_weight is not None:
            grad_weight[:, tap] = (later_MC * wide_NC[: num_rows - back]).sum(0)
    return grad_x.to(x_NC.dtype), grad_weight
