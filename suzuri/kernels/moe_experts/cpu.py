"""As reference.py, expert by expert, for as little work as one thread does quickest."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import SMALL_PRODUCT, check_indices, loop
from suzuri.kernels.loops import exp, products, to_bf16


def is_small(weights_NJ: Tensor, gate_up_EFD: Tensor) -> bool:
    """Whether the products are too few for a second thread."""
    return weights_NJ.numel() * gate_up_EFD.shape[1] * gate_up_EFD.shape[2] <= SMALL_PRODUCT


@loop
def _experts(x, chosen, weights, gate_up, down, low_precision, out):
    (tokens, slots), (num_experts, width, doubled) = weights.shape, gate_up.shape
    routed = chosen.shape[1]
    experts = np.empty((tokens, slots), np.int64)
    check_indices(chosen.reshape(-1), num_experts)
    for n in range(tokens):
        for j in range(routed):
            experts[n, j] = chosen[n, j]
        for j in range(routed, slots):
            experts[n, j] = num_experts - slots + j
    rows, hidden_width = tokens * slots, doubled // 2
    offsets = np.zeros(num_experts + 1, np.int64)
    for n in range(tokens):
        for j in range(slots):
            offsets[experts[n, j] + 1] += 1
    for e in range(num_experts):
        offsets[e + 1] += offsets[e]
    free, place = offsets.copy(), np.empty((tokens, slots), np.int64)
    sorted_x = np.empty((rows, width), np.float32)
    for n in range(tokens):
        for j in range(slots):
            m = free[experts[n, j]]
            free[experts[n, j]] = m + 1
            place[n, j] = m
            row = sorted_x[m]
            for d in range(width):
                row[d] = x[n, d]
    middle = np.empty((rows, doubled), np.float32)
    hidden = np.empty((rows, hidden_width), np.float32)
    y = np.empty((rows, width), np.float32)
    for e in range(num_experts):
        low, high = offsets[e], offsets[e + 1]
        if high == low:
            continue
        products(sorted_x[low:high], gate_up[e], middle[low:high], 0, doubled)
        for m in range(low, high):
            gates, ups, row = middle[m][0::2], middle[m][1::2], hidden[m]
            for f in range(hidden_width):
                gate = gates[f]
                silu = gate / (np.float32(1.0) + np.float32(exp(-gate)))
                row[f] = silu * ups[f]
            if low_precision:
                for f in range(hidden_width):
                    row[f] = to_bf16(row[f])
        products(hidden[low:high], down[e], y[low:high], 0, width)
    if low_precision:
        for m in range(rows):
            for d in range(width):
                y[m, d] = to_bf16(y[m, d])
    for n in range(tokens):
        source, weight = y[place[n, 0]], weights[n, 0]
        for d in range(width):
            out[n, d] = weight * source[d]
        for j in range(1, slots):
            source, weight = y[place[n, j]], weights[n, j]
            for d in range(width):
                out[n, d] += weight * source[d]


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
        array(weights_NJ.contiguous()),
        exact.transposed(gate_up_EFD),
        exact.transposed(down_EDF),
        x_ND.dtype == torch.bfloat16,
        out,
    )
    return tensor(out, x_ND.dtype)
