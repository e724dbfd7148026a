"""As reference.py. With state row by row: every row reads the ring before one is written. Without,
and for the gradient, LANES rows side by side: what is done to one number is done to a whole line.
"""

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
    spread,
    words,
)
from suzuri.kernels.kept import kept
from suzuri.kernels.log_scaling.reference import tau
from suzuri.kernels.loops import add_tap, norm_row, round_row, to_bf16


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


LANES = 64
"""Rows handled at once without state."""
PARTS = 8
"""Partial sums of the gradients of weights, however many threads there are."""
ONE, ZERO = np.float32(1.0), np.float32(0.0)


@loop
def _gather(x, first, count, column, out, start):
    """out[c, start + i] = x[first + i, column + c]."""
    for i in range(count):
        row = x[first + i]
        for c in range(out.shape[0]):
            out[c, start + i] = number(row[column + c])


@loop
def _scatter(x, count, out, first, column):
    """out[first + i, column + c] = x[c, i]."""
    for i in range(count):
        row = out[first + i]
        for c in range(x.shape[0]):
            row[column + c] = x[c, i]


@loop
def _tree(x, sums):
    """As `tree`, for every lane of x, which is overwritten."""
    n, half = x.shape[0], 1
    while half * 2 < n:
        half *= 2
    while half:
        for c in range(n - half):
            for i in range(LANES):
                x[c, i] += x[half + c, i]
        n = half
        half //= 2
    for i in range(LANES):
        sums[i] = x[0, i]


@loop
def _scales(x, start, eps, terms, scale):
    """What each lane of x[start:] is multiplied by in its norm."""
    width = terms.shape[0]
    for c in range(width):
        for i in range(LANES):
            terms[c, i] = x[start + c, i] * x[start + c, i]
    _tree(terms, scale)
    for i in range(LANES):
        scale[i] = ONE / np.sqrt(scale[i] / np.float32(width) + np.float32(eps))


@loop
def _round(x):
    for c in range(x.shape[0]):
        for i in range(LANES):
            x[c, i] = to_bf16(x[c, i])


@loop
def _convolve(x, conv, index, out, low_precision):
    """out [C, LANES]: lane i of out is row taps - 1 + i of x; `index`: rows before it."""
    taps = conv.shape[0]
    for c in range(out.shape[0]):
        for tap in range(taps):
            back, weight = taps - 1 - tap, conv[tap, c]
            source = x[c, tap : tap + LANES]
            if tap == 0:
                for i in range(LANES):
                    out[c, i] = weight * (source[i] if index[i] >= np.int32(back) else ZERO)
            else:
                for i in range(LANES):
                    out[c, i] += weight * (source[i] if index[i] >= np.int32(back) else ZERO)
        source = x[c, taps - 1 : taps - 1 + LANES]
        for i in range(LANES):
            out[c, i] += source[i]
    if low_precision:
        _round(out)


@loop
def _near(index, first, count, found):
    """Of `count` rows from `first` on how many rows of their sequence are before each; else 0."""
    for i in range(count):
        found[i] = index[first + i]
    found[count:] = 0


@loop
def _packed(x, conv, q_norm, k_norm, index, eps, tau, low_precision, first, last, q, r, k, v):
    """Without state, blocks `first` to `last` of LANES rows."""
    (rows, q_width), half, channels = q.shape, k.shape[1], q_norm.size
    heads, kv_heads = q_width // channels, half // channels
    taps, kv_width = conv.shape
    query, terms = np.zeros((channels, LANES), np.float32), np.empty((channels, LANES), np.float32)
    given = np.zeros((kv_width, LANES + taps - 1), np.float32)
    kv, key = np.empty((kv_width, LANES), np.float32), np.empty((channels, LANES), np.float32)
    scale, before = np.empty(LANES, np.float32), np.empty(LANES, np.int32)
    factor = np.full(LANES, ONE, np.float32)
    for block in range(first, last):
        n = block * LANES
        count = min(LANES, rows - n)
        for i in range(count if tau.size else 0):
            factor[i] = tau[n + i]
        for h in range(heads):
            _gather(x, n, count, h * channels, query, 0)
            _scales(query, 0, eps, terms, scale)
            for c in range(channels):
                for i in range(LANES):
                    query[c, i] = query[c, i] * scale[i] * q_norm[c]
            if low_precision:
                _round(query)
            if tau.size:
                for c in range(channels):
                    for i in range(LANES):
                        query[c, i] = query[c, i] * factor[i]
                if low_precision:
                    _round(query)
            _scatter(query, count, q, n, h * channels)
        for i in range(count):
            row, place = x[n + i], q_width + kv_width
            for b in range(r.shape[1]):
                branch = number(row[place + b])
                if tau.size:
                    branch = branch * factor[i]
                    branch = to_bf16(branch) if low_precision else branch
                r[n + i, b] = branch
        _near(index, n, count, before)
        early = min(taps - 1, n)
        _gather(x, n - early, early + count, q_width, given, taps - 1 - early)
        _convolve(given, conv, before, kv, low_precision)
        for u in range(kv_heads):
            place = u * channels
            _scales(kv, place, eps, terms, scale)
            for c in range(channels):
                for i in range(LANES):
                    key[c, i] = kv[place + c, i] * scale[i] * k_norm[c]
            if low_precision:
                _round(key)
            _scatter(key, count, k, n, place)
            _scatter(kv[half + place : half + place + channels], count, v, n, place)


@loop
def _norm_backward(x, start, weight, grad, eps, terms, scale, mean, total):
    """As gradient.py of rms_norm, lane by lane, in place: `grad` becomes that of x, x is lost."""
    width = weight.size
    _scales(x, start, eps, terms, scale)
    for c in range(width):
        factor = weight[c]
        for i in range(LANES):
            x[start + c, i] *= scale[i]
        for i in range(LANES):
            total[c, i] += grad[c, i] * x[start + c, i]
        for i in range(LANES):
            grad[c, i] *= factor
        for i in range(LANES):
            terms[c, i] = grad[c, i] * x[start + c, i]
    _tree(terms, mean)
    for i in range(LANES):
        mean[i] = mean[i] / np.float32(width)
    for c in range(width):
        for i in range(LANES):
            grad[c, i] = (grad[c, i] - x[start + c, i] * mean[i]) * scale[i]


@loop
def _rows_backward(
    x,
    conv,
    q_norm,
    k_norm,
    index,
    eps,
    tau,
    low_precision,
    grads,
    first,
    last,
    dx,
    dkv,
    dq_norm,
    dk_norm,
):
    """Of everything but the convolution: of queries and branches into dx, of what it gave into dkv.
    Parts `first` to `last` of the blocks of LANES rows, each with sums of its own."""
    q_grad, r_grad, k_grad, v_grad = grads
    (rows, q_width), half = q_grad.shape, k_grad.shape[1]
    parts, channels = dq_norm.shape
    taps = conv.shape[0]
    query, grad = np.zeros((channels, LANES), np.float32), np.zeros((channels, LANES), np.float32)
    terms, given = np.empty_like(query), np.zeros((half, LANES + taps - 1), np.float32)
    keys, before = np.empty((half, LANES), np.float32), np.empty(LANES, np.int32)
    scale, mean = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    factor, blocks = np.full(LANES, ONE, np.float32), (rows + LANES - 1) // LANES
    for part in range(first, last):
        q_sums, k_sums = np.zeros(query.shape, np.float64), np.zeros(query.shape, np.float64)
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            n = block * LANES
            count = min(LANES, rows - n)
            if count < LANES:
                grad[:] = ZERO
            for i in range(count if tau.size else 0):
                factor[i] = tau[n + i]
            for place in range(0, q_width, channels):
                _gather(x, n, count, place, query, 0)
                _gather(q_grad, n, count, place, grad, 0)
                for c in range(channels if tau.size else 0):
                    for i in range(LANES):
                        grad[c, i] *= factor[i]
                _norm_backward(query, 0, q_norm, grad, eps, terms, scale, mean, q_sums)
                _scatter(grad, count, dx, n, place)
            for i in range(count):
                row, place = dx[n + i], q_width + 2 * half
                for b in range(r_grad.shape[1]):
                    row[place + b] = number(r_grad[n + i, b]) * factor[i]
            _near(index, n, count, before)
            early = min(taps - 1, n)
            _gather(x, n - early, early + count, q_width, given, taps - 1 - early)
            _convolve(given, conv, before, keys, low_precision)
            for place in range(0, half, channels):
                _gather(k_grad, n, count, place, grad, 0)
                _norm_backward(keys, place, k_norm, grad, eps, terms, scale, mean, k_sums)
                _scatter(grad, count, dkv, n, place)
            for i in range(count):
                row = dkv[n + i]
                for c in range(half):
                    row[half + c] = number(v_grad[n + i, c])
        for c in range(channels):
            for i in range(LANES):
                dq_norm[part, c] += q_sums[c, i]
                dk_norm[part, c] += k_sums[c, i]


@loop
def _conv_backward(x, conv, index, dkv, q_width, first, last, dx, dconv):
    """Of the convolution: row n was an input of row n + back, if that is of its sequence."""
    rows, kv_width = dkv.shape
    parts, taps = dconv.shape[:2]
    for part in range(first, last):
        for n in range(rows * part // parts, rows * (part + 1) // parts):
            own, out = x[n][q_width : q_width + kv_width], dx[n][q_width : q_width + kv_width]
            for c in range(kv_width):
                out[c] = dkv[n, c]
            for back in range(min(taps, rows - n)):
                if index[n + back] >= back:
                    tap = taps - 1 - back
                    for c in range(kv_width):
                        given = dkv[n + back, c]
                        out[c] += conv[tap, c] * given
                        dconv[part, tap, c] += given * number(own[c])


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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    rows, channels, dtype = qkvr_NX.shape[0], q_norm_C.shape[0], qkvr_NX.dtype
    width = qkvr_NX.shape[1] // heads - channels - 2 * kv_heads * channels // heads
    q, r = empty(rows, heads, channels), empty(rows, heads, width)
    x, conv = words(qkvr_NX.contiguous()), exact.transposed(conv_CK)
    norms = (exact.widened(q_norm_C), exact.widened(k_norm_C))
    factors, is_low = _factors(sequences[0], scaling), dtype == torch.bfloat16
    if state is not None:
        memory = (
            lasting_words(state.conv_LRC),
            lasting(state.conv_slots_S),
            lasting_words(state.k_pages_PTUC),
            lasting_words(state.v_pages_PTUC),
            lasting(state.page_slots_N),
        )
        positions, seq_ids, starts = map(lasting, sequences)
        where = (positions, seq_ids, starts)
        _rows(x, conv, *norms, *where, eps, factors, *memory, is_low, q, r)
        return tensor(q, dtype), tensor(r, dtype), None, None
    k, v = (empty(rows, kv_heads, channels) for _ in range(2))
    out = [y.reshape(rows, y[:1].size if rows else 0) for y in (q, r, k, v)]
    given = (x, conv, *norms, kept(_index, *sequences[1:]), eps, factors, is_low)
    blocks, work = -(-rows // LANES), 16 * x.size
    spread(work, blocks, lambda first, last: _packed(*given, first, last, *out))
    return tensor(q, dtype), tensor(r, dtype), tensor(k, dtype), tensor(v, dtype)


def _factors(positions_N: Tensor, scaling: tuple[float, float, int] | None) -> Array:
    """The scale of each row's queries; empty where they have none."""
    return _NOTHING if scaling is None else kept(_tau, positions_N, params=tuple(scaling))


def _tau(positions_N: Tensor, n_floor: float, alpha: float, offset: int) -> Array:
    return array(tau(positions_N, n_floor, alpha, torch.float32, offset))


def _index(seq_ids_N: Tensor, seq_starts_S1: Tensor) -> Array:
    """How many rows of its sequence are before each row."""
    return array(torch.arange(seq_ids_N.shape[0]) - seq_starts_S1[seq_ids_N])


def attention_prologue_backward(
    qkvr_NX: Tensor,
    conv_CK: Tensor,
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    sequences: Sequence[Tensor],
    eps: float,
    scaling: tuple[float, float, int] | None,
    grads: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkvr in its dtype and of the weights in fp32, from those of q, r, k and v."""
    x, conv = words(qkvr_NX.contiguous()), exact.transposed(conv_CK)
    norms = (exact.widened(q_norm_C), exact.widened(k_norm_C))
    index, factors = kept(_index, *sequences[1:]), _factors(sequences[0], scaling)
    is_low, outer = (
        qkvr_NX.dtype == torch.bfloat16,
        tuple(words(y.flatten(1).contiguous()) for y in grads),
    )
    dx, dkv = empty(*x.shape), empty(x.shape[0], conv.shape[1])
    dq_norm, dk_norm = (np.zeros((PARTS, q_norm_C.shape[0]), np.float64) for _ in range(2))
    dconv = np.zeros((PARTS, *conv.shape), np.float64)
    given = (x, conv, *norms, index, eps, factors, is_low, outer)
    sums, work = (dx, dkv, dq_norm, dk_norm), 16 * x.size
    spread(work, PARTS, lambda first, last: _rows_backward(*given, first, last, *sums))
    given_conv = (x, conv, index, dkv, outer[0].shape[1])
    spread(work, PARTS, lambda first, last: _conv_backward(*given_conv, first, last, dx, dconv))
    parts = map(torch.from_numpy, (dconv.T, dq_norm.T, dk_norm.T))
    conv_grad, q_grad, k_grad = (exact.tree_sum(y).to(torch.float32) for y in parts)
    return tensor(dx, qkvr_NX.dtype), conv_grad, q_grad, k_grad
