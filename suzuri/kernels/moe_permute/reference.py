"""Stable sort by expert; the gathers are permutations, so that no gradient needs atomics."""

import torch
from torch import Tensor

from suzuri.kernels import exact


class PermuteRows(torch.autograd.Function):
    """x[order], whose backward is grad[inverse]."""

    @staticmethod
    def forward(ctx, x_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        return x_MD.index_select(0, order_M)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_M), None, None


class _CopyRows(torch.autograd.Function):
    """Every row num_slots times, whose backward adds a row's gradients in slot order, in at least
    fp32: the library's sum has an order of its own."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, num_slots: int) -> Tensor:
        ctx.shape = (x_ND.shape[0], num_slots)
        return x_ND.repeat_interleave(num_slots, 0)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        grad_NJD = grads[0].unflatten(0, ctx.shape)
        total_ND = exact.widen(grad_NJD[:, 0])
        for slot in range(1, ctx.shape[1]):
            total_ND = total_ND + grad_NJD[:, slot]
        return total_ND.to(grads[0].dtype), None


def all_slots(
    experts_NK: Tensor, num_slots: int, num_experts: int, num_rows_1: Tensor | None = None
) -> Tensor:
    """The chosen ids and those of the shared experts, which are the last ones, [N, num_slots];
    num_experts in the rows from num_rows on."""
    num_shared = num_slots - experts_NK.shape[1]
    experts_NJ = experts_NK
    if num_shared:
        shared_S = torch.arange(num_experts - num_shared, num_experts, device=experts_NK.device)
        experts_NJ = torch.cat([experts_NK, shared_S.expand(experts_NK.shape[0], -1)], 1)
    if num_rows_1 is not None:
        rows_N = torch.arange(experts_NK.shape[0], device=experts_NK.device)
        experts_NJ = torch.where((rows_N < num_rows_1)[:, None], experts_NJ, num_experts)
    return experts_NJ


def moe_permute(
    x_ND: Tensor, experts_NJ: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sorted_M, order_M = torch.sort(experts_NJ.reshape(-1), stable=True)
    inverse_M = torch.empty_like(order_M)
    inverse_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    experts_E1 = torch.arange(num_experts + 1, device=order_M.device)
    offsets_E1 = torch.searchsorted(sorted_M, experts_E1)
    rows_MD: Tensor = PermuteRows.apply(
        _CopyRows.apply(x_ND, experts_NJ.shape[1]), order_M, inverse_M
    )
    return rows_MD, order_M, inverse_M, offsets_E1
