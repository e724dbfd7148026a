"""As reference.py, expert by expert, for as little work as one thread does quickest."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import SMALL_PRODUCT, loop, spread
from suzuri.kernels.loops import exp, products, round_row, swiglu_row, tree
from suzuri.kernels.moe_combine.cpu import combine_rows
from suzuri.kernels.moe_permute.cpu import copy_rows, sort_slots


def is_small(weights_NJ: Tensor, gate_up_EFD: Tensor) -> bool:
    """Whether the products are too few for a second thread."""
    return weights_NJ.numel() * gate_up_EFD.shape[1] * gate_up_EFD.shape[2] <= SMALL_PRODUCT


@loop
def _experts(x, chosen, weights, gate_up, down, low_precision, out):
    (tokens, slots), (num_experts, width, doubled) = weights.shape, gate_up.shape
    routed = chosen.shape[1]
    rows, hidden_width = tokens * slots, doubled // 2
    experts = np.empty((tokens, slots), np.int64)
    for n in range(tokens):
        for j in range(routed):
            experts[n, j] = chosen[n, j]
        for j in range(routed, slots):
            experts[n, j] = num_experts - slots + j
    sorted_x, order = np.empty((rows, width), np.float32), np.empty(rows, np.int64)
    inverse, offsets = np.empty(rows, np.int64), np.empty(num_experts + 1, np.int64)
    sort_slots(experts, num_experts, order, inverse, offsets)
    copy_rows(x, order, slots, sorted_x, 0, rows)
    middle = np.empty((rows, doubled), np.float32)
    hidden = np.empty((rows, hidden_width), np.float32)
    y = np.empty((rows, width), np.float32)
    for e in range(num_experts):
        low, high = offsets[e], offsets[e + 1]
        if high == low:
            continue
        products(sorted_x[low:high], gate_up[e], middle[low:high], 0, doubled)
        for m in range(low, high):
            swiglu_row(middle[m], hidden[m])
            if low_precision:
                round_row(hidden[m])
        products(hidden[low:high], down[e], y[low:high], 0, width)
    if low_precision:
        for m in range(rows):
            round_row(y[m])
    combine_rows(y, inverse, weights, out, 0, tokens)


def moe_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
) -> Tensor:
    out = empty(*x_ND.shape)
    _experts(
        array(exact.widen(x_ND).contiguous()),
        array(experts_NK.contiguous()),
        exact.widened(weights_NJ),
        exact.transposed(gate_up_EFD),
        exact.transposed(down_EDF),
        x_ND.dtype == torch.bfloat16,
        out,
    )
    return tensor(out, x_ND.dtype)


@loop
def _middle(gate_up, grad_hidden, weights, low_precision, of_slots, out, first, last):
    """What `gradient.middle` returns, for some rows: `out` becomes the gradient of gate_up,
    grad_hidden the weighted hidden units."""
    width = grad_hidden.shape[1]
    gate, up = np.empty(width, np.float32), np.empty(width, np.float32)
    hidden, opened = np.empty(width, np.float32), np.empty(width, np.float32)
    terms = np.empty(width, np.float32)
    for m in range(first, last):
        row, grads, weight, found = gate_up[m], grad_hidden[m], weights[m], out[m]
        for f in range(width):
            gate[f], up[f] = row[2 * f], row[2 * f + 1]
        for f in range(width):
            opened[f] = np.float32(1.0) / (np.float32(1.0) + np.float32(exp(-gate[f])))
        for f in range(width):
            hidden[f] = gate[f] * opened[f] * up[f]
        if low_precision:
            round_row(hidden)
        for f in range(width):
            terms[f] = grads[f] * hidden[f]
        for f in range(width):
            grad = grads[f] * weight
            slope = np.float32(1.0) + gate[f] * (np.float32(1.0) - opened[f])
            grads[f] = hidden[f] * weight
            gate[f] = gate[f] * opened[f] * grad
            up[f] = up[f] * opened[f] * slope * grad
        for f in range(width):
            found[2 * f], found[2 * f + 1] = up[f], gate[f]
        of_slots[m] = tree(terms, width)


WORK = 16
"""Of one hidden unit in `_middle`, in multiplications."""


def middle(
    gate_up_MF2: Tensor, grad_hidden_MF: Tensor, weights_M: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    of_slots = empty(weights_M.shape[0])
    gate_up, grad_hidden = array(gate_up_MF2), array(grad_hidden_MF)
    out = empty(*gate_up.shape)
    given = (gate_up, grad_hidden, array(weights_M), dtype == torch.bfloat16, of_slots, out)
    work = WORK * grad_hidden.size
    spread(work, len(of_slots), lambda first, last: _middle(*given, first, last))
    return tensor(of_slots), grad_hidden_MF, tensor(out)
