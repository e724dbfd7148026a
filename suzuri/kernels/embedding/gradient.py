"""The gradient of an embedding table: the rows of each id added in order of position, no atomics.

Saved: the ids. A table's gradient is as large as the table, and at least fp32.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding import embedding


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD: Tensor, ids_N: Tensor, num_rows: int | None) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.num_rows = weight_VD.shape[0]
        return embedding(ids_N, weight_VD, num_rows=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (ids_N,) = ctx.saved_tensors
        if dispatch.use_cpu(grad_ND):
            from suzuri.kernels.embedding import cpu

            return cpu.add_rows(grad_ND, ids_N, ctx.num_rows), None, None
        return add_rows(grad_ND, ids_N, ctx.num_rows), None, None


def add_rows(grad_ND: Tensor, ids_N: Tensor, num_rows: int) -> Tensor:
    """out[v] = the sum of the rows n of grad [N, D] with ids[n] = v: [num_rows, D], at least fp32.

    A doubling scan over the stably sorted rows leaves each sum in the last row of its id, from
    where it is written once; the host waits for nothing. Ids that are not in the table add nothing.
    """
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    x_ND = exact.widen(grad_ND).index_select(0, order_N)
    step = 1
    while step < x_ND.shape[0]:
        same_M1 = (sorted_N[step:] == sorted_N[:-step])[:, None]
        x_ND = torch.cat([x_ND[:step], x_ND[step:] + x_ND[:-step].masked_fill(~same_M1, 0.0)])
        step *= 2
    writes_N = (sorted_N >= 0) & (sorted_N < num_rows)
    writes_N[:-1] &= sorted_N[1:] != sorted_N[:-1]
    # Whatever is no sum goes to one row more, which is left out.
    out_VD = x_ND.new_zeros(num_rows + 1, x_ND.shape[1])
    out_VD[torch.where(writes_N, sorted_N, num_rows)] = x_ND
    return out_VD[:num_rows]
