"""As reference.py, one row and KV head at a time: a key that a row cannot see is an exact identity
in every sum, so only those that it sees are read.
"""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, empty, lasting, tensor
from suzuri.kernels.compiled import lasting_words, loop, number, spread
from suzuri.kernels.kept import kept
from suzuri.kernels.loops import exp, to_bf16, tree
from suzuri.kernels.relative_attention.reference import (
    CHUNK_GLOBAL,
    CHUNK_LOCAL,
    EMPTY_MAX,
    TILE,
)

EMPTY, ZERO, ONE = np.float32(EMPTY_MAX), np.float32(0.0), np.float32(1.0)


@loop
def _fold(total_most, total_weight, total_value, most, weight, value):
    """Joins a chunk's partial result to the total and empties it."""
    heads, channels = value.shape
    for g in range(heads):
        new = total_most[g]
        if most[g] > new or np.isnan(most[g]):
            new = most[g]
        a = np.float32(exp(total_most[g] - new))
        b = np.float32(exp(most[g] - new))
        total_most[g] = new
        total_weight[g] = total_weight[g] * a + weight[g] * b
        for c in range(channels):
            total_value[g, c] = total_value[g, c] * a + value[g, c] * b
        most[g], weight[g] = EMPTY, ZERO
        for c in range(channels):
            value[g, c] = ZERO


# Rows are sliced, so that the innermost index is a plain loop variable: those loops vectorise.


def _dots(row, keys, low, high, products):
    """products[j] = row [C] times key j, C in order; keys [C, TILE]."""
    channels = row.size
    four = channels - channels % 4
    out = products[low:high]
    for j in range(out.size):
        out[j] = 0.0
    for c in range(0, four, 4):
        a0, a1 = np.float64(row[c]), np.float64(row[c + 1])
        a2, a3 = np.float64(row[c + 2]), np.float64(row[c + 3])
        k0, k1 = keys[c][low:high], keys[c + 1][low:high]
        k2, k3 = keys[c + 2][low:high], keys[c + 3][low:high]
        for j in range(out.size):
            out[j] = (((out[j] + a0 * k0[j]) + a1 * k1[j]) + a2 * k2[j]) + a3 * k3[j]
    for c in range(four, channels):
        a0, k0 = np.float64(row[c]), keys[c][low:high]
        for j in range(out.size):
            out[j] += a0 * k0[j]


def _weighted(shares, values, low, high, sums):
    """sums [C] = values [TILE, C] times the share of each key, keys in order."""
    channels = sums.size
    four = high - (high - low) % 4
    for c in range(channels):
        sums[c] = 0.0
    for j in range(low, four, 4):
        a0, a1 = np.float64(shares[j]), np.float64(shares[j + 1])
        a2, a3 = np.float64(shares[j + 2]), np.float64(shares[j + 3])
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for c in range(channels):
            sums[c] = (((sums[c] + a0 * v0[c]) + a1 * v1[c]) + a2 * v2[c]) + a3 * v3[c]
    for j in range(four, high):
        a0, v0 = np.float64(shares[j]), values[j]
        for c in range(channels):
            sums[c] += a0 * v0[c]


def _biases(branch, proj, first, low, high, bias):
    """bias[j] = branch [B] times column first + j of proj [B, E], from `low` on."""
    out = bias[low:high]
    for j in range(out.size):
        out[j] = 0.0
    for b in range(branch.size):
        a, column = np.float64(branch[b]), proj[b][first + low : first + high]
        for j in range(out.size):
            out[j] += a * np.float64(column[j])


# All numbers here are fp32 or bf16 ones, whose products are exact in fp64.
_dots_fused = loop(_dots, fused=True)
_weighted_fused = loop(_weighted, fused=True)
_biases_fused = loop(_biases, fused=True)


@loop
def _gather(k_pages, v_pages, pages, u, k0, low, high, keys, values):
    """Keys (transposed) and values of a tile; `pages` is the row of the page table."""
    size, channels = k_pages.shape[1], keys.shape[0]
    four = channels - channels % 4
    j = low
    while j < high:
        page, offset = pages[(k0 + j) // size], (k0 + j) % size
        if page < 0 or page >= k_pages.shape[0]:
            raise IndexError("paged_attention: a page that a row sees is not in the pool")
        end = min(high, j + size - offset)
        k_rows = k_pages[page][offset : offset + end - j]
        v_rows = v_pages[page][offset : offset + end - j]
        for c in range(0, four, 4):
            t0, t1 = keys[c][j:end], keys[c + 1][j:end]
            t2, t3 = keys[c + 2][j:end], keys[c + 3][j:end]
            for i in range(end - j):
                row = k_rows[i][u][c : c + 4]
                t0[i], t1[i] = number(row[0]), number(row[1])
                t2[i], t3[i] = number(row[2]), number(row[3])
        for c in range(four, channels):
            t0 = keys[c][j:end]
            for i in range(end - j):
                t0[i] = number(k_rows[i][u][c])
        v_out = values[j:end]
        for i in range(end - j):
            row, out = v_rows[i][u], v_out[i]
            for c in range(channels):
                out[c] = number(row[c])
        j = end


@loop
def _softmax(score, low, high, top, terms):
    """score = exp(score - max) from `low` to `high`, the max at least `top`. Returns (max, sum by
    the tree). In blocks of 8, filled up with -inf."""
    first, last = low // 8 * 8, (high + 7) // 8 * 8
    score[first:low] = -np.inf
    score[high:last] = -np.inf
    lanes = terms[:8]
    lanes[:] = top
    for j in range(first, last, 8):
        block = score[j : j + 8]
        for i in range(8):
            lanes[i] = max(lanes[i], block[i])
    for i in range(8):
        top = max(top, lanes[i])
    terms[:] = 0.0
    for j in range(first, last, 8):
        block, copy = score[j : j + 8], terms[j : j + 8]
        for i in range(8):
            # A NaN is lost in the max and found again in the sum.
            block[i] = exp(block[i] - top)
            copy[i] = block[i]
    return top, tree(terms, TILE)


@loop
def _attend(
    q, r, proj, k_pages, v_pages, table, firsts, starts, window, low_precision, begin, end, out
):
    """Rows `begin` to `end`. `proj` [B, E] with its columns reversed: a later key is nearer."""
    _, heads, channels = q.shape
    kv_heads, reach = k_pages.shape[2], proj.shape[1]
    group = heads // kv_heads
    chunk = CHUNK_GLOBAL if window <= 0 else CHUNK_LOCAL
    keys, values = np.empty((channels, TILE), np.float64), np.empty((TILE, channels), np.float64)
    products, bias = np.empty(TILE, np.float64), np.empty(TILE, np.float64)
    score, terms = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    sums = np.empty(channels, np.float64)
    most, weight = np.empty(group, np.float32), np.empty(group, np.float32)
    value = np.empty((group, channels), np.float32)
    total_most, total_weight = np.empty(group, np.float32), np.empty(group, np.float32)
    total_value = np.empty((group, channels), np.float32)
    for s in range(firsts.size):
        for n in range(max(starts[s], begin), min(starts[s + 1], end)):
            position = firsts[s] + n - starts[s]
            first_key = 0 if window <= 0 else max(position - window + 1, 0)
            for u in range(kv_heads):
                most[:], weight[:], value[:] = EMPTY, ZERO, ZERO
                first_tile, is_folded = first_key // TILE * TILE, False
                for k0 in range(first_tile, position + 1, TILE):
                    if k0 % chunk == 0 and k0 > first_tile:
                        if not is_folded:
                            is_folded = True
                            total_most[:], total_weight[:], total_value[:] = EMPTY, ZERO, ZERO
                        _fold(total_most, total_weight, total_value, most, weight, value)
                    low, high = max(first_key - k0, 0), min(position + 1 - k0, TILE)
                    _gather(k_pages, v_pages, table[s], u, k0, low, high, keys, values)
                    # The tile's keys that the bias reaches are those from `near` on.
                    near = min(max(position - reach + 1 - k0, low), high)
                    for g in range(group):
                        h = u * group + g
                        _dots_fused(q[n, h], keys, low, high, products)
                        _biases_fused(r[n, h], proj, reach - 1 - position + k0, near, high, bias)
                        bias[low:near] = 0.0
                        scores, dots, biases = score[low:high], products[low:high], bias[low:high]
                        for j in range(scores.size):
                            # The bias joins on the unrounded accumulator: one rounding.
                            scores[j] = dots[j] / channels + biases[j]
                        top, total = _softmax(score, low, high, most[g], terms)
                        fade = np.float32(exp(most[g] - top)) if most[g] != top else ONE
                        most[g] = top
                        weight[g] = weight[g] * fade + total
                        if low_precision:
                            for j in range(low, high):
                                score[j] = to_bf16(score[j])
                        _weighted_fused(score, values, low, high, sums)
                        values_g = value[g]
                        for c in range(channels):
                            values_g[c] = values_g[c] * fade + np.float32(sums[c])
                if is_folded:
                    _fold(total_most, total_weight, total_value, most, weight, value)
                    value[:], weight[:] = total_value, total_weight
                for g in range(group):
                    row, values_g = out[n, u * group + g], value[g]
                    for c in range(channels):
                        # Adding zero is the fold with an empty total: it takes the sign off a zero.
                        row[c] = (values_g[c] + ZERO) / weight[g]


def _reversed(proj_BE: Tensor) -> Array:
    return array(exact.widen(proj_BE))[:, ::-1].copy()


def paged_attention(
    q_NHC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    k_pages_PTUC: Tensor,
    v_pages_PTUC: Tensor,
    page_table_SM: Tensor,
    first_positions_S: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> Tensor:
    rows, heads, channels = q_NHC.shape
    out, starts = empty(rows, heads, channels), lasting(seq_starts_S1)
    out[: starts[0]] = out[starts[-1] :] = ZERO
    given = (
        array(exact.widen(q_NHC).contiguous()),
        array(exact.widen(r_NHB).contiguous()),
        kept(_reversed, proj_BE, num_bytes=4 * proj_BE.numel()),
        lasting_words(k_pages_PTUC.contiguous()),
        lasting_words(v_pages_PTUC.contiguous()),
        lasting(page_table_SM.contiguous()),
        lasting(first_positions_S),
        starts,
        window or 0,
        q_NHC.dtype == torch.bfloat16,
    )
    keys = page_table_SM.shape[1] * k_pages_PTUC.shape[1]
    work = 2 * rows * heads * channels * min(keys, window or keys)
    spread(work, rows, lambda begin, end: _attend(*given, begin, end, out))
    return tensor(out, q_NHC.dtype)
