"""Row selection whose backward is bit-equal from run to run."""

import torch
from torch import Tensor

from suzuri.kernels import exact


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD: Tensor, ids_N: Tensor) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.num_rows = weight_VD.shape[0]
        return weight_VD.index_select(0, ids_N)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_ND,) = grads
        (ids_N,) = ctx.saved_tensors
        rows, sums = exact.segment_sum(exact.widen(grad_ND), ids_N)
        out = grad_ND.new_zeros(ctx.num_rows, grad_ND.shape[1])
        out[rows] = sums.to(grad_ND.dtype)
        return out, None


def embedding(ids_N: Tensor, weight_VD: Tensor) -> Tensor:
    exact.check_indices(ids_N, weight_VD.shape[0], "id")
    if not exact.records_gradient(weight_VD):
        return exact.take_rows(weight_VD, ids_N)
    return _Select.apply(weight_VD, ids_N)
