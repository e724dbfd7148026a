"""As reference.py: a counting sort."""

import torch
from torch import Tensor

from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import check_indices, loop, number, spread, words

WORK = 6
"""Of one number of a row, in multiplications: it comes from far away."""


@loop
def sort_slots(experts, num_experts, order, inverse, offsets):
    """The permutation that `moe_permute` returns, written into the last three arguments."""
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


@loop
def copy_rows(x, order, slots, rows, first, last):
    """The sorted rows `first` to `last`."""
    for m in range(first, last):
        source, row = x[order[m] // slots], rows[m]
        for d in range(row.size):
            row[d] = source[d]


@loop
def _sum_slots(rows, places, out, first, last):
    slots = places.shape[1]
    for n in range(first, last):
        total, row = out[n], rows[places[n, 0]]
        for d in range(total.size):
            total[d] = number(row[d])
        for j in range(1, slots):
            row = rows[places[n, j]]
            for d in range(total.size):
                total[d] += number(row[d])


def sum_slots(rows_MD: Tensor, places_NJ: Tensor) -> Tensor:
    """As gradient.py."""
    rows, places = words(rows_MD.contiguous()), array(places_NJ)
    out = empty(len(places), rows.shape[1])
    given = (rows, places, out)
    spread(WORK * rows.size, len(out), lambda first, last: _sum_slots(*given, first, last))
    return tensor(out)


def moe_permute(
    x_ND: Tensor, experts_NJ: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = experts_NJ.numel()
    rows_MD = x_ND.new_empty((num_rows, x_ND.shape[1]))
    order_M = experts_NJ.new_empty(num_rows)
    inverse_M, offsets_E1 = torch.empty_like(order_M), experts_NJ.new_empty(num_experts + 1)
    found = (array(order_M), array(inverse_M), array(offsets_E1))
    experts = array(experts_NJ.contiguous())
    sort_slots(experts, num_experts, *found)
    given = (words(x_ND.contiguous()), found[0], experts_NJ.shape[1], words(rows_MD))
    spread(WORK * rows_MD.numel(), num_rows, lambda first, last: copy_rows(*given, first, last))
    return rows_MD, order_M, inverse_M, offsets_E1
