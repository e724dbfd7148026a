"""As reference.py with state, row by row; every row reads the ring before one is written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, empty, lasting, tensor
from suzuri.kernels.compiled import (
    check_indices,
    check_slots,
    lasting_words,
    loop,
    number,
    put,
    words,
)
from suzuri.kernels.kept import kept
from suzuri.kernels.log_scaling.reference import tau
from suzuri.kernels.loops import add_tap, norm_row, round_row


@loop
def _norm(x, weight, eps, squares, low_precision):
    """x [C] normed in place, rounded."""
    norm_row(x, weight, eps, squares, x)
    if low_precision:
        round_row(x)


@loop
def _scale(x, factor, low_precision):
    """x times the factor of its position, rounded."""
    for c in range(x.size):
        x[c] = x[c] * factor
    if low_precision:
        round_row(x)


@loop
def _rows(
    x,
    conv,
    q_norm,
    k_norm,
    positions,
    seq_ids,
    starts,
    eps,
    tau,
    ring_state,
    conv_slots,
    k_pages,
    v_pages,
    page_slots,
    low_precision,
    q,
    r,
):
    rows, heads, channels = q.shape
    width, kv_heads, size = r.shape[2], k_pages.shape[2], k_pages.shape[1]
    taps, kv_width = conv.shape
    ring = ring_state.shape[1]
    check_indices(conv_slots, ring_state.shape[0])
    check_slots(page_slots, k_pages.shape[0] * size)
    q_width = heads * channels
    kv, zeros = np.empty(kv_width, np.float32), np.zeros(kv_width, np.float32)
    squares = np.empty(channels, np.float32)
    for n in range(rows):
        row = x[n]
        sequence, position = seq_ids[n], positions[n]
        index, slot = n - starts[sequence], conv_slots[sequence]
        for tap in range(taps):
            back = taps - 1 - tap
            if back <= index:
                earlier = x[n - back][q_width : q_width + kv_width]
                add_tap(kv, conv[tap], earlier, tap == 0)
            elif back <= position:
                remembered = ring_state[slot, (position - back) % ring]
                add_tap(kv, conv[tap], remembered, tap == 0)
            else:
                add_tap(kv, conv[tap], zeros, tap == 0)
        own = row[q_width : q_width + kv_width]
        for c in range(kv_width):
            kv[c] += number(own[c])
        if low_precision:
            round_row(kv)
        for h in range(heads):
            query, source = q[n, h], row[h * channels : (h + 1) * channels]
            for c in range(channels):
                query[c] = number(source[c])
            _norm(query, q_norm, eps, squares, low_precision)
            first = q_width + kv_width + h * width
            branch, source = r[n, h], row[first : first + width]
            for b in range(width):
                branch[b] = number(source[b])
            if tau.size:
                _scale(query, tau[n], low_precision)
                _scale(branch, tau[n], low_precision)
        if page_slots[n] >= 0:
            page, offset = page_slots[n] // size, page_slots[n] % size
            half = kv_heads * channels
            for u in range(kv_heads):
                key = kv[u * channels : (u + 1) * channels]
                _norm(key, k_norm, eps, squares, low_precision)
                put(k_pages[page, offset, u], key)
                put(v_pages[page, offset, u], kv[half + u * channels : half + (u + 1) * channels])
    for n in range(rows):
        sequence = seq_ids[n]
        length = starts[sequence + 1] - starts[sequence]
        if n - starts[sequence] >= length - ring:
            place = ring_state[conv_slots[sequence], positions[n] % ring]
            source = x[n][q_width : q_width + kv_width]
            for c in range(kv_width):
                place[c] = source[c]


_NOTHING = np.empty(0, np.float32)


def attention_prologue(
    qkvr_NX: Tensor,
    conv_CK: Tensor,
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    sequences: Sequence[Tensor],
    heads: int,
    kv_heads: int,
    eps: float,
    scaling: tuple[float, float, int] | None,
    state: Any,
) -> tuple[Tensor, Tensor, None, None]:
    rows, channels = qkvr_NX.shape[0], q_norm_C.shape[0]
    width = qkvr_NX.shape[1] // heads - channels - 2 * kv_heads * channels // heads
    q, r = empty(rows, heads, channels), empty(rows, heads, width)
    factors = _NOTHING
    if scaling is not None:
        n_floor, alpha, offset = scaling
        factors = kept(_tau, sequences[0], params=(n_floor, alpha, offset))
    positions, seq_ids, starts = map(lasting, sequences)
    _rows(
        words(qkvr_NX.contiguous()),
        exact.transposed(conv_CK),
        exact.widened(q_norm_C),
        exact.widened(k_norm_C),
        positions,
        seq_ids,
        starts,
        eps,
        factors,
        lasting_words(state.conv_LRC),
        lasting(state.conv_slots_S),
        lasting_words(state.k_pages_PTUC),
        lasting_words(state.v_pages_PTUC),
        lasting(state.page_slots_N),
        qkvr_NX.dtype == torch.bfloat16,
        q,
        r,
    )
    return tensor(q, qkvr_NX.dtype), tensor(r, qkvr_NX.dtype), None, None


def _tau(positions_N: Tensor, n_floor: float, alpha: float, offset: int) -> Array:
    return array(tau(positions_N, n_floor, alpha, torch.float32, offset))
