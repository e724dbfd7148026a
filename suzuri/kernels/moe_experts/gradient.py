"""All experts with a gradient, in one Function.

Saved: the inputs, and on a CPU gate and up of every slot, 2F fp32 numbers: to multiply for them
again takes a twentieth of a step there. A GPU's memory is dearer: its backward sorts and multiplies
again. The slot outputs are not needed: with g = down^T @ grad, unweighted, the gradient of a slot's
weight is g . hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.grouped_gemm.gradient import of_inputs, of_weights
from suzuri.kernels.moe_experts import moe_experts
from suzuri.kernels.moe_experts.reference import with_parts
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.moe_permute.gradient import sum_slots


class MoeExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        experts_NK: Tensor,
        weights_NJ: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
    ) -> Tensor:
        given = (x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
        if x_ND.is_cpu:
            # The parts of the op, in the same bits, whatever their size.
            out_ND, (order, gate_up_MF2) = with_parts(*given)
            ctx.save_for_backward(*given, *order, gate_up_MF2)
            return out_ND
        ctx.save_for_backward(*given)
        return moe_experts(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF, *parts = ctx.saved_tensors
        needs_x, _, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad
        num_experts, slots = gate_up_EFD.shape[0], weights_NJ.shape[1]
        if parts:
            order, gate_up_MF2 = Permutation(*parts[:3]), parts[3]
            rows_MD = x_ND.index_select(0, order.order_M // slots)
        else:
            rows_MD, order = moe_permute(x_ND, experts_NK, num_experts=num_experts, num_slots=slots)
            wide = exact.at_least_fp32(x_ND.dtype)
            gate_up_MF2 = grouped_gemm(rows_MD, gate_up_EFD, order.offsets_E1, out_dtype=wide)
        offsets_E1 = order.offsets_E1
        grad_rows_MD = grads[0].index_select(0, order.order_M // slots)
        weights_M = exact.widen(weights_NJ).reshape(-1).index_select(0, order.order_M)

        grad_hidden_MF = of_inputs(grad_rows_MD, down_EDF, offsets_E1)
        of_slots_M, weighted_MF, grad_gate_up_MF2 = middle(
            gate_up_MF2, grad_hidden_MF, weights_M, x_ND.dtype
        )
        grad_x = grad_weights = grad_gate_up = grad_down = None
        if needs_x:
            grad_MD = of_inputs(grad_gate_up_MF2, gate_up_EFD, offsets_E1)
            grad_x = sum_slots(grad_MD, order.inverse_M.unflatten(0, weights_NJ.shape))
            grad_x = grad_x.to(x_ND.dtype)
        if needs_weights:
            grad_weights = of_slots_M.index_select(0, order.inverse_M)
            grad_weights = grad_weights.reshape(weights_NJ.shape).to(weights_NJ.dtype)
        if needs_gate_up:
            grad_gate_up = of_weights(grad_gate_up_MF2, rows_MD, offsets_E1)
        if needs_down:
            grad_down = of_weights(grad_rows_MD, weighted_MF, offsets_E1)
        return grad_x, None, grad_weights, grad_gate_up, grad_down


def middle(
    gate_up_MF2: Tensor, grad_hidden_MF: Tensor, weights_M: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What lies between the products of the slots, all in at least fp32: the gradient of every
    slot's weight, the hidden units (rounded to `dtype`) times that weight, and the gradient of gate
    and up. The gradient of the hidden units comes without the weight, and is overwritten; on a GPU
    gate and up are too.

    A GPU's kernel rounds the gradient of gate and up to `dtype`: both products there take it so."""
    if dispatch.use_cpu(gate_up_MF2):
        from suzuri.kernels.moe_experts import cpu

        return cpu.middle(gate_up_MF2, grad_hidden_MF, weights_M, dtype)
    if not dispatch.use_reference(gate_up_MF2) and gate_up_MF2.dtype in dispatch.LOOP_DTYPES:
        from suzuri.kernels.swiglu import kernel

        return kernel.slots_backward(gate_up_MF2, grad_hidden_MF, weights_M, dtype)
    gate_MF, up_MF = gate_up_MF2[:, 0::2], gate_up_MF2[:, 1::2]
    open_MF = 1 / (1 + torch.exp(-gate_MF))
    silu_MF = gate_MF * open_MF
    hidden_MF = (silu_MF * up_MF).to(dtype).to(gate_MF.dtype)
    of_slots_M = (grad_hidden_MF * hidden_MF).sum(-1)
    grad_hidden_MF = grad_hidden_MF * weights_M[:, None]
    slope_MF = open_MF * (1 + gate_MF * (1 - open_MF))
    grad_gate_up = torch.empty_like(gate_up_MF2)
    grad_gate_up[:, 0::2] = grad_hidden_MF * up_MF * slope_MF
    grad_gate_up[:, 1::2] = grad_hidden_MF * silu_MF
    return of_slots_M, hidden_MF * weights_M[:, None], grad_gate_up
