"""The gradient of embedding_sum. Saved: the ids."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding_sum import embedding_sum

ROWS = 4096
"""Bounds the table of counts [ROWS, V]."""


class EmbeddingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD: Tensor, ids_NB: Tensor) -> Tensor:
        ctx.save_for_backward(ids_NB)
        ctx.num_rows = weight_VD.shape[0]
        return embedding_sum(ids_NB, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None]:
        (ids_NB,) = ctx.saved_tensors
        if dispatch.use_cpu(grad_ND):
            from suzuri.kernels.embedding import cpu

            return cpu.add_rows(grad_ND, ids_NB, ctx.num_rows), None
        return _backward(grad_ND, ids_NB, ctx.num_rows), None


def _backward(grad_ND: Tensor, ids_NB: Tensor, num_rows: int) -> Tensor:
    """How often each row of the table is in each sum, times the gradients of the sums."""
    grad_ND = exact.widen(grad_ND)
    out_VD = grad_ND.new_zeros(num_rows, grad_ND.shape[1])
    for first in range(0, grad_ND.shape[0], ROWS):
        rows_ND, ids = grad_ND[first : first + ROWS], ids_NB[first : first + ROWS]
        # One column more for ids that are not in the table.
        known = (ids >= 0) & (ids < num_rows)
        counts_NV = grad_ND.new_zeros(rows_ND.shape[0], num_rows + 1)
        ones = torch.ones_like(ids, dtype=counts_NV.dtype)
        counts_NV.scatter_add_(  # exact: counts are integers, in whatever order they are added
            1, torch.where(known, ids, num_rows), ones
        )
        out_VD.addmm_(counts_NV[:, :num_rows].T, rows_ND)
    return out_VD
