"""As reference.py: a counting sort."""

import torch
from torch import Tensor

from suzuri.kernels.arrays import array
from suzuri.kernels.compiled import check_indices, loop, words


@loop
def sort_rows(x, experts, num_experts, rows, order, inverse, offsets):
    """What `moe_permute` returns, written into its last four arguments."""
    tokens, slots = experts.shape
    check_indices(experts.reshape(-1), num_experts)
    for e in range(num_experts + 1):
        offsets[e] = 0
    for n in range(tokens):
        for j in range(slots):
            offsets[experts[n, j] + 1] += 1
    for e in range(num_experts):
        offsets[e + 1] += offsets[e]
    free = offsets.copy()
    for n in range(tokens):
        for j in range(slots):
            place = free[experts[n, j]]
            free[experts[n, j]] = place + 1
            order[place] = n * slots + j
            inverse[n * slots + j] = place
            row = rows[place]
            for d in range(x.shape[1]):
                row[d] = x[n, d]


def moe_permute(
    x_ND: Tensor, experts_NJ: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = experts_NJ.numel()
    rows_MD = x_ND.new_empty((num_rows, x_ND.shape[1]))
    order_M = experts_NJ.new_empty(num_rows)
    inverse_M, offsets_E1 = torch.empty_like(order_M), experts_NJ.new_empty(num_experts + 1)
    found = (array(order_M), array(inverse_M), array(offsets_E1))
    experts = array(experts_NJ.contiguous())
    sort_rows(words(x_ND.contiguous()), experts, num_experts, words(rows_MD), *found)
    return rows_MD, order_M, inverse_M, offsets_E1
