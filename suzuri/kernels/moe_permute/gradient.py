"""The sort with a gradient: a row's gradient is the sum over its slots, in slot order."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.moe_permute import moe_permute


class MoePermute(torch.autograd.Function):
    """Saves the places of the slots."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, experts_NJ: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows_MD, order = moe_permute(x_ND, experts_NJ, num_experts=num_experts)
        ctx.save_for_backward(order.inverse_M)
        ctx.shape, ctx.dtype = experts_NJ.shape, x_ND.dtype
        ctx.mark_non_differentiable(*order)
        ctx.set_materialize_grads(False)
        return rows_MD, order.order_M, order.inverse_M, order.offsets_E1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (inverse_M,) = ctx.saved_tensors
        grad_MD = grads[0]
        if grad_MD is None:
            return None, None, None
        return sum_slots(grad_MD, inverse_M.unflatten(0, ctx.shape)).to(ctx.dtype), None, None


def sum_slots(rows_MD: Tensor, places_NJ: Tensor) -> Tensor:
    """sum over j, ascending, of rows[places[n, j]] in at least fp32: [N, D]."""
    if dispatch.use_cpu(rows_MD):
        from suzuri.kernels.moe_permute import cpu

        return cpu.sum_slots(rows_MD, places_NJ)
    total_ND = exact.widen(rows_MD.index_select(0, places_NJ[:, 0]))
    for slot in range(1, places_NJ.shape[1]):
        total_ND = total_ND + rows_MD.index_select(0, places_NJ[:, slot])
    return total_ND
