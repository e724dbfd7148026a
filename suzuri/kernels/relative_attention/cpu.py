"""As reference.py: the loops of paged_attention, over pages into which the keys are copied first.
And the gradient: the formula of gradient.py by distance, for BLOCK query rows at once.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, tensor
from suzuri.kernels.compiled import loop, number, spread, words
from suzuri.kernels.kept import kept
from suzuri.kernels.paged_attention import cpu as paged
from suzuri.kernels.relative_attention.reference import EMPTY_MAX, TILE

BLOCK = 64
"""Query rows handled at once: the lanes of every loop of the gradient."""
LANES = 16
"""Sums of the bank's gradient that run side by side."""
GROUP_ROWS = 256
"""Short sequences share blocks: neighbours are taken together until they have so many rows."""
PARTS = 16
"""Parts that threads share out. The bank's gradient is summed within each, then over them."""
EMPTY, ZERO, ONE = np.float32(EMPTY_MAX), np.float32(0.0), np.float32(1.0)


def relative_attention(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> Tensor:
    layout = kept(_layout, seq_starts_S1)
    k_PTUC, v_PTUC = (_paged(x, layout) for x in (k_NUC, v_NUC))
    where = (layout.table_SM, layout.first_S, seq_starts_S1)
    return paged.paged_attention(q_NHC, r_NHB, proj_BE, k_PTUC, v_PTUC, *where, window)


class _Layout(NamedTuple):
    """Pages of a tile each, of which every sequence has its own: a tile is then read in one go.

    Packed rows `begin` to `end` belong to a sequence; place_M is where each lies in the pages.
    """

    begin: int
    end: int
    num_pages: int
    place_M: Tensor
    table_SM: Tensor
    first_S: Tensor


def _layout(seq_starts_S1: Tensor) -> _Layout:
    starts = seq_starts_S1.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    firsts = [0, *accumulate(-(-length // TILE) for length in lengths)]
    places = [
        torch.arange(first * TILE, first * TILE + length)
        for first, length in zip(firsts, lengths, strict=False)
    ]
    place_M = torch.cat([torch.zeros(0, dtype=torch.int64), *places])
    # Behind a sequence's last page the table names pages of the next ones.
    widest = -(-max(lengths, default=0) // TILE)
    table_SM = torch.tensor(firsts[:-1], dtype=torch.int64)[:, None] + torch.arange(widest)
    first_S = torch.zeros(len(lengths), dtype=torch.int64)
    return _Layout(starts[0], starts[-1], firsts[-1], place_M, table_SM, first_S)


def _paged(x_NUC: Tensor, layout: _Layout) -> Tensor:
    """The rows in pages; no row looks at what is behind a sequence's last."""
    x_XUC = x_NUC.new_empty((layout.num_pages * TILE, *x_NUC.shape[1:]))
    x_XUC[layout.place_M] = x_NUC[layout.begin : layout.end]
    return x_XUC.unflatten(0, (layout.num_pages, TILE))


@loop
def _exp(x):
    """exp of an fp32 number <= 0, good to 1e-7 of itself; 0 where it is below 1e-38."""
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)
    power = shifted - np.float32(12582912.0)
    rest = x - power * np.float32(0.693359375)
    rest = rest + power * np.float32(2.12194440e-4)
    y = np.float32(1 / 720)
    y = y * rest + np.float32(1 / 120)
    y = y * rest + np.float32(1 / 24)
    y = y * rest + np.float32(1 / 6)
    y = y * rest + np.float32(1 / 2)
    y = y * rest + ONE
    y = y * rest + ONE
    bits = (np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)
    return y * np.int32(bits).view(np.float32) if x > np.float32(-87.0) else ZERO


@loop
def _columns(x, first, rows, head, factor, out, start):
    """out[c, start + i] = x[first + i, head, c] * factor."""
    channels = out.shape[0]
    for i in range(rows):
        row = x[first + i][head]
        for c in range(channels):
            out[c, start + i] = number(row[c]) * factor


@loop
def _rows(x, start, rows, factor, out, first, head):
    """The way back."""
    channels = x.shape[0]
    for i in range(rows):
        row = out[first + i][head]
        for c in range(channels):
            row[c] = x[c, start + i] * factor


@loop
def _dots(x, y, at, out):
    """out[i] = sum over c of x[c, i] * y[c, at + i]."""
    channels = x.shape[0]
    four = channels - channels % 4
    for i in range(BLOCK):
        out[i] = ZERO
    for c in range(0, four, 4):
        x0, x1, x2, x3 = x[c], x[c + 1], x[c + 2], x[c + 3]
        y0, y1 = y[c][at : at + BLOCK], y[c + 1][at : at + BLOCK]
        y2, y3 = y[c + 2][at : at + BLOCK], y[c + 3][at : at + BLOCK]
        for i in range(BLOCK):
            out[i] += (x0[i] * y0[i] + x1[i] * y1[i]) + (x2[i] * y2[i] + x3[i] * y3[i])
    for c in range(four, channels):
        x0, y0 = x[c], y[c][at : at + BLOCK]
        for i in range(BLOCK):
            out[i] += x0[i] * y0[i]


@loop
def _weights(q, grad, r, k, v, proj, position, start, distances, p, dp):
    """p[d, i]: weight of the key at distance d; dp: its derivative less their weighted mean, times
    the weight, which is the gradient of the score."""
    width, reach = proj.shape
    top, total = np.full(BLOCK, EMPTY, np.float32), np.zeros(BLOCK, np.float32)
    mean = np.zeros(BLOCK, np.float32)
    least = position.min()
    for d in range(distances):
        score = p[d]
        _dots(q, k, start - d, score)
        _dots(grad, v, start - d, dp[d])
        if d < reach:
            for b in range(width):
                a, branch = proj[b, d], r[b]
                for i in range(BLOCK):
                    score[i] += a * branch[i]
        if d > least:
            for i in range(BLOCK):
                score[i] = score[i] if position[i] >= d else -np.float32(np.inf)
        for i in range(BLOCK):
            top[i] = max(top[i], score[i])
    for d in range(distances):
        score, change = p[d], dp[d]
        for i in range(BLOCK):
            score[i] = _exp(score[i] - top[i])
        for i in range(BLOCK):
            total[i] += score[i]
        for i in range(BLOCK):
            mean[i] += score[i] * change[i]
    for i in range(BLOCK):
        total[i] = ONE / total[i] if total[i] > ZERO else ZERO
        mean[i] *= total[i]
    for d in range(distances):
        share, change = p[d], dp[d]
        for i in range(BLOCK):
            share[i] *= total[i]
            change[i] = share[i] * (change[i] - mean[i])


@loop
def _add_to_rows(ds, k, start, distances, dq):
    """dq[c, i] = sum over d of ds[d, i] * k[c, start - d + i]."""
    channels = dq.shape[0]
    four = distances - distances % 4
    dq[:] = ZERO
    for d in range(0, four, 4):
        s0, s1, s2, s3 = ds[d], ds[d + 1], ds[d + 2], ds[d + 3]
        at = start - d
        for c in range(channels):
            out, row = dq[c], k[c]
            k0, k1 = row[at : at + BLOCK], row[at - 1 : at - 1 + BLOCK]
            k2, k3 = row[at - 2 : at - 2 + BLOCK], row[at - 3 : at - 3 + BLOCK]
            for i in range(BLOCK):
                out[i] += (s0[i] * k0[i] + s1[i] * k1[i]) + (s2[i] * k2[i] + s3[i] * k3[i])
    for d in range(four, distances):
        s0, at = ds[d], start - d
        for c in range(channels):
            out, k0 = dq[c], k[c][at : at + BLOCK]
            for i in range(BLOCK):
                out[i] += s0[i] * k0[i]


@loop
def _add_to_keys(p, ds, q, grad, start, distances, dk, dv):
    """dk[c, start - d + i] += ds[d, i] * q[c, i], and dv with p and the output's gradient."""
    channels = q.shape[0]
    for d in range(distances):
        at, share, change = start - d, p[d], ds[d]
        for c in range(channels):
            dk_c, dv_c = dk[c][at : at + BLOCK], dv[c][at : at + BLOCK]
            q_c, grad_c = q[c], grad[c]
            for i in range(BLOCK):
                dk_c[i] += change[i] * q_c[i]
            for i in range(BLOCK):
                dv_c[i] += share[i] * grad_c[i]


@loop
def _add_to_bias(ds, r, proj, distances, dr, sums):
    """dr[b, i] = sum over d of ds[d, i] * proj[b, d]; sums[b, d] += r[b, i] * ds[d, i]."""
    width, reach = proj.shape
    near = min(distances, reach)
    dr[:] = ZERO
    for d in range(near):
        change = ds[d]
        for b in range(width):
            a, out, branch, lanes = proj[b, d], dr[b], r[b], sums[b, d]
            for i in range(BLOCK):
                out[i] += a * change[i]
            for i in range(0, BLOCK, LANES):
                s, x = change[i : i + LANES], branch[i : i + LANES]
                for j in range(LANES):
                    lanes[j] += s[j] * x[j]


@loop
def _backward(q, k, v, r, proj, grad, starts, groups, window, begin, end, dq, dk, dv, dr, dproj):
    """Units `begin` to `end` of one part: unit n is KV head n % U of group n // U, the sequences
    groups[g] .. groups[g + 1]."""
    heads, channels = q.shape[1], q.shape[2]
    kv_heads, width, reach = k.shape[1], r.shape[2], proj.shape[1]
    most, longest = 0, 0
    for unit in range(begin, end):
        first, last = groups[unit // kv_heads], groups[unit // kv_heads + 1]
        most = max(most, starts[last] - starts[first])
        for s in range(first, last):
            longest = max(longest, starts[s + 1] - starts[s])
    longest = longest if window <= 0 else min(longest, window)
    blocks = (most + BLOCK - 1) // BLOCK
    size = (blocks + 1) * BLOCK
    factor = ONE / np.float32(channels)
    keys, values = np.empty((channels, size), np.float32), np.empty((channels, size), np.float32)
    dkeys, dvalues = np.empty_like(keys), np.empty_like(keys)
    query, outer = np.empty((channels, BLOCK), np.float32), np.empty((channels, BLOCK), np.float32)
    dquery, branch = np.empty_like(query), np.empty((width, BLOCK), np.float32)
    dbranch = np.empty_like(branch)
    p, ds = np.empty((longest, BLOCK), np.float32), np.empty((longest, BLOCK), np.float32)
    positions = np.empty(size, np.int32)
    sums = np.zeros((width, min(longest, reach), LANES), np.float32)
    for unit in range(begin, end):
        group, u = unit // kv_heads, unit % kv_heads
        first = starts[groups[group]]
        rows = starts[groups[group + 1]] - first
        positions[:] = -1
        for s in range(groups[group], groups[group + 1]):
            for n in range(starts[s], starts[s + 1]):
                positions[n - first] = n - starts[s]
        keys[:], values[:], dkeys[:], dvalues[:] = ZERO, ZERO, ZERO, ZERO
        _columns(k, first, rows, u, ONE, keys, BLOCK)
        _columns(v, first, rows, u, ONE, values, BLOCK)
        for n in range(0, rows, BLOCK):
            count, position = min(rows - n, BLOCK), positions[n : n + BLOCK]
            distances = min(position.max() + 1, longest)
            if count < BLOCK:
                query[:], outer[:], branch[:] = ZERO, ZERO, ZERO
            for h in range(u * heads // kv_heads, (u + 1) * heads // kv_heads):
                _columns(q, first + n, count, h, factor, query, 0)
                _columns(grad, first + n, count, h, ONE, outer, 0)
                _columns(r, first + n, count, h, ONE, branch, 0)
                _weights(
                    query, outer, branch, keys, values, proj, position, n + BLOCK, distances, p, ds
                )
                _add_to_rows(ds, keys, n + BLOCK, distances, dquery)
                _add_to_keys(p, ds, query, outer, n + BLOCK, distances, dkeys, dvalues)
                _add_to_bias(ds, branch, proj, distances, dbranch, sums)
                _rows(dquery, 0, count, factor, dq, first + n, h)
                _rows(dbranch, 0, count, ONE, dr, first + n, h)
        _rows(dkeys, BLOCK, rows, ONE, dk, first, u)
        _rows(dvalues, BLOCK, rows, ONE, dv, first, u)
    for b in range(width):
        for d in range(sums.shape[1]):
            for j in range(LANES):
                dproj[b, d] += sums[b, d, j]


def _groups(starts: list[int]) -> list[int]:
    """First sequence of each group, and the end."""
    groups = [0]
    for s in range(1, len(starts) - 1):
        if starts[s] - starts[groups[-1]] >= GROUP_ROWS:
            groups.append(s)
    return [*groups, len(starts) - 1]


def _parts(starts: list[int], groups: list[int], kv_heads: int, window: int) -> list[int]:
    """First unit of each part, and the end: parts of about equal work."""
    costs: list[int] = []
    for first, last in pairwise(groups):
        cost = 1
        for s in range(first, last):
            length = starts[s + 1] - starts[s]
            cost += length * min(length + BLOCK, window or length + BLOCK)
        costs += [cost] * kv_heads
    ends = list(accumulate(costs))
    parts = [0]
    for unit, end in enumerate(ends):
        if end * PARTS >= ends[-1] * len(parts):
            parts.append(unit + 1)
    return parts


def relative_attention_backward(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    grad_NHC: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, r in their dtype and of proj in fp32."""
    starts = seq_starts_S1.tolist()
    q, k, v, r, grad = (words(x.contiguous()) for x in (q_NHC, k_NUC, v_NUC, r_NHB, grad_NHC))
    dq, dk, dv, dr = (np.zeros(x.shape, np.float32) for x in (q, k, v, r))
    groups = _groups(starts)
    parts = _parts(starts, groups, k.shape[1], window or 0)
    dproj = np.zeros((len(parts) - 1, *proj_BE.shape), np.float64)
    given = (q, k, v, r, exact.widened(proj_BE), grad, array(seq_starts_S1), np.asarray(groups))

    def run(first: int, last: int) -> None:
        for part in range(first, last):
            begin, end = parts[part], parts[part + 1]
            _backward(*given, window or 0, begin, end, dq, dk, dv, dr, dproj[part])

    longest = max(end - begin for begin, end in pairwise(starts))
    work = 5 * q.size * min(longest, window or longest)
    spread(work, len(parts) - 1, run)
    total = np.zeros(proj_BE.shape, np.float64)
    for part in dproj:
        total = total + part
    dtype, proj_grad = q_NHC.dtype, torch.from_numpy(total).to(torch.float32)
    return tensor(dq, dtype), tensor(dk, dtype), tensor(dv, dtype), tensor(dr, dtype), proj_grad
