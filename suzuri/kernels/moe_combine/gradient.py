"""The weighted sum with a gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import exact
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation


class MoeCombine(torch.autograd.Function):
    """Saves its inputs, y only for the gradient of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        y_MD: Tensor,
        order_M: Tensor,
        inverse_M: Tensor,
        offsets_E1: Tensor,
        weights_NJ: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        kept = y_MD if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(kept, order_M, inverse_M, weights_NJ)
        ctx.dtype = y_MD.dtype
        order = Permutation(order_M, inverse_M, offsets_E1)
        return moe_combine(y_MD, order, weights_NJ, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_MD, order_M, inverse_M, weights_NJ = ctx.saved_tensors
        (grad_ND,) = grads
        slots = weights_NJ.shape[1]
        grad_y = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_MD = exact.widen(grad_ND).index_select(0, order_M // slots)
            weights_M = weights_NJ.reshape(-1).index_select(0, order_M)
            grad_y = (grad_MD * weights_M[:, None]).to(ctx.dtype)
        if ctx.needs_input_grad[4]:
            places_NJ, columns = inverse_M.unflatten(0, weights_NJ.shape), []
            for slot in range(slots):
                product_ND = exact.widen(y_MD.index_select(0, places_NJ[:, slot])) * grad_ND
                columns.append(product_ND.sum(-1))
            grad_weights = torch.stack(columns, 1).to(weights_NJ.dtype)
        return grad_y, None, None, None, grad_weights, None
