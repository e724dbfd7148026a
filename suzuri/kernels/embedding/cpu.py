"""The gradient of a table, id by id."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array
from suzuri.kernels.compiled import check_indices, loop


@loop
def _add_rows(grad, ids, order, per_row, out):
    """out[v] += the rows order[i] // per_row of grad whose sorted ids[i] are v, in fp64."""
    check_indices(ids, out.shape[0])
    total = np.zeros(grad.shape[1], np.float64)
    last = ids.size - 1
    for i in range(ids.size):
        row = grad[order[i] // per_row]
        for d in range(total.size):
            total[d] += row[d]
        if i == last or ids[i + 1] != ids[i]:
            place = out[ids[i]]
            for d in range(total.size):
                place[d] = total[d]
                total[d] = 0.0


def add_rows(grad_ND: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """As add_rows of gradient.py, rounded once; ids [N], or [N, B] for B ids of each row."""
    sorted_M, order_M = torch.sort(ids.reshape(-1), stable=True)
    grad_ND = exact.widen(grad_ND).contiguous()
    out_VD = grad_ND.new_zeros(num_rows, grad_ND.shape[1])
    per_row = ids.shape[1] if ids.dim() == 2 else 1
    _add_rows(array(grad_ND), array(sorted_M), array(order_M), per_row, array(out_VD))
    return out_VD
