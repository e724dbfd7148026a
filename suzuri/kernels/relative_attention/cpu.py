"""As reference.py: the loops of paged_attention, over pages into which the keys are copied first.
And the gradient: the formula of gradient.py in fp32, for BLOCK query rows at once.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, tensor
from suzuri.kernels.compiled import loop, number, spread, words
from suzuri.kernels.gradient_products import fp32_room
from suzuri.kernels.kept import kept
from suzuri.kernels.paged_attention import cpu as paged
from suzuri.kernels.paged_attention.cpu import HALF, LOT, product
from suzuri.kernels.relative_attention.reference import EMPTY_MAX, TILE

BLOCK = 64
"""Query rows handled at once in the gradient."""
SLACK = 64
"""Columns behind the last, which products may read or write."""
GROUP_ROWS = 256
"""Short sequences share blocks: neighbours are taken together until they have so many rows."""
PARTS = 16
"""Parts that threads share out. The bank's gradient is summed within each, then over them."""
ONE = np.float32(1.0)


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
def _room(rows, columns):
    """Zeros: what products read beside the numbers that count must be finite."""
    zeros = fp32_room(rows, columns)
    zeros[:] = np.float32(0.0)
    return zeros


@loop
def _columns(x, first, rows, head, factor, out):
    """out[c, i] = x[first + i, head, c] * factor."""
    channels = x.shape[2]
    four = channels - channels % 4
    for c in range(0, four, 4):
        t0, t1, t2, t3 = out[c], out[c + 1], out[c + 2], out[c + 3]
        for i in range(rows):
            row = x[first + i][head][c : c + 4]
            t0[i], t1[i] = number(row[0]) * factor, number(row[1]) * factor
            t2[i], t3[i] = number(row[2]) * factor, number(row[3]) * factor
    for c in range(four, channels):
        t0 = out[c]
        for i in range(rows):
            t0[i] = number(x[first + i][head][c]) * factor


@loop
def _lines(x, first, rows, head, factor, out, start):
    """out[start + i, c] = x[first + i, head, c] * factor."""
    for i in range(rows):
        row, line = x[first + i][head], out[start + i]
        for c in range(row.size):
            line[c] = number(row[c]) * factor


@loop
def _write_lines(x, rows, factor, out, first, head):
    """The way back, from the first `rows` rows of x."""
    for i in range(rows):
        row, line = out[first + i][head], x[i]
        for c in range(row.size):
            row[c] = line[c] * factor


@loop
def _write_columns(x, rows, out, first, head):
    """out[first + i, head, c] = x[c, i]."""
    channels = out.shape[2]
    four = channels - channels % 4
    for c in range(0, four, 4):
        t0, t1, t2, t3 = x[c], x[c + 1], x[c + 2], x[c + 3]
        for i in range(rows):
            row = out[first + i][head][c : c + 4]
            row[0], row[1], row[2], row[3] = t0[i], t1[i], t2[i], t3[i]
    for c in range(four, channels):
        t0 = x[c]
        for i in range(rows):
            out[first + i][head][c] = t0[i]


@loop
def _add(x, rows, first, last, out, start):
    """out[:, start + j] += x[:, j] for j from `first` to `last`."""
    for c in range(rows):
        a, b = x[c][first:last], out[c][start + first : start + last]
        for j in range(a.size):
            b[j] += a[j]


@loop
def quick_exp(x):
    """exp of an fp32 number that is not positive, within two units in the last place."""
    x = max(x, np.float32(-87.0))
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    power = shifted - np.float32(12582912.0)
    rest = x - power * np.float32(0.693145751953125)
    rest = rest - power * np.float32(1.4286068203094172e-06)
    y = np.float32(1 / 720)
    y = y * rest + np.float32(1 / 120)
    y = y * rest + np.float32(1 / 24)
    y = y * rest + np.float32(1 / 6)
    y = y * rest + np.float32(0.5)
    y = y * rest + ONE
    y = y * rest + ONE
    bits = (np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)
    return y * np.int32(bits).view(np.float32)


def _share(p, ds, bias, m, i, low, high, width, reach, skewed, first, lanes):
    """Row i of p: scores become weights; of ds: derivatives of the weights become those of the
    scores. The row sees keys `low` to `high` of `width`; skewed[i] is ds by distance, from column
    `first` on (distance 0 is in the last)."""
    near = max(low, high - reach)
    score, added = p[i][near:high], bias[m][reach - high + near : reach]
    for j in range(score.size):
        score[j] += added[j]
    begin, end = low // LOT * LOT, (high + LOT - 1) // LOT * LOT
    before, behind = p[i][begin:low], p[i][high:end]
    for j in range(before.size):
        before[j] = -np.inf
    for j in range(behind.size):
        behind[j] = -np.inf
    for j in range(LOT):
        lanes[j] = EMPTY_MAX
    for start in range(begin, end, LOT):
        z = p[i][start : start + LOT]
        for j in range(LOT):
            lanes[j] = z[j] if z[j] > lanes[j] else lanes[j]
    top = np.float32(EMPTY_MAX)
    for j in range(LOT):
        top = lanes[j] if lanes[j] > top else top
    total, mean = np.float32(0.0), np.float32(0.0)
    x, y, whole = p[i][low:high], ds[i][low:high], p[i][begin:end]
    for j in range(whole.size):
        whole[j] = quick_exp(whole[j] - top)
    for j in range(x.size):
        total += x[j]
        mean += x[j] * y[j]
    scale = ONE / total
    mean *= scale
    for j in range(x.size):
        x[j] *= scale
        y[j] = x[j] * (y[j] - mean)
    a, b = p[i][:low], ds[i][:low]
    for j in range(a.size):
        a[j] = 0.0
        b[j] = 0.0
    a, b = p[i][high:width], ds[i][high:width]
    for j in range(a.size):
        a[j] = 0.0
        b[j] = 0.0
    z, y = skewed[i][first : reach - high + near], ds[i][near:high]
    for j in range(z.size):
        z[j] = 0.0
    z = skewed[i][reach - high + near : reach]
    for j in range(z.size):
        z[j] = y[j]


_share_reordered = loop(_share, reordered=True)


@loop
def _quads(
    query,
    outer,
    branch,
    keys,
    keys_t,
    values_t,
    proj,
    positions,
    window,
    n,
    count,
    first_key,
    p,
    ds,
    bias,
    skewed,
    first,
    dquery,
    source,
):
    """Fills p, ds, skewed and dquery of `count` rows; row i is key n - first_key + i."""
    channels, width, reach = query.shape[1], branch.shape[1], skewed.shape[1] - SLACK
    lanes = np.empty(LOT, np.float32)
    keys_here = n + count - first_key
    for i in range(0, count, 4):
        rows = min(4, count - i)
        low, high, most = keys_here, n + i + rows - first_key, 0
        for m in range(rows):
            sees = positions[n + i + m] + 1
            sees = sees if window <= 0 else min(sees, window)
            low, most = min(low, n + i + m + 1 - first_key - sees), max(most, sees)
        product(query, i, 0, 4, keys_t, 0, channels, low, high, first_key, p, i, source)
        product(outer, i, 0, 4, values_t, 0, channels, low, high, first_key, ds, i, source)
        product(branch, i, 0, 4, proj, 0, width, max(reach - most, 0), reach, 0, bias, 0, source)
        for m in range(rows):
            sees = positions[n + i + m] + 1
            sees = sees if window <= 0 else min(sees, window)
            end = n + i + m + 1 - first_key
            _share_reordered(
                p, ds, bias, m, i + m, end - sees, end, keys_here, reach, skewed, first, lanes
            )
        product(ds, i, low, 4, keys, first_key + low, high - low, 0, channels, 0, dquery, i, source)


@loop
def _add_to_keys(
    query_t,
    outer_t,
    p,
    ds,
    before,
    count,
    width,
    distances,
    part,
    dkeys,
    dvalues,
    first_key,
    source,
):
    """Row i of p and ds belongs to the key in column before + i, and sees `distances` at most."""
    channels = dkeys.shape[0]
    step = 2 * HALF if distances <= 4 * HALF else 4 * HALF
    for j in range(0, width, step):
        end = min(j + step, width)
        first, last = max(j - before, 0), min(end - before + distances - 1, count)
        if first < last:
            for c in range(0, channels, 4):
                product(query_t, c, first, 4, ds, first, last - first, j, end, 0, part, c, source)
            _add(part, channels, j, end, dkeys, first_key)
            for c in range(0, channels, 4):
                product(outer_t, c, first, 4, p, first, last - first, j, end, 0, part, c, source)
            _add(part, channels, j, end, dvalues, first_key)


@loop
def _backward(
    q,
    k,
    v,
    r,
    proj,
    proj_t,
    grad,
    starts,
    groups,
    parts,
    window,
    begin,
    end,
    dq,
    dk,
    dv,
    dr,
    dproj,
    source,
):
    """Parts `begin` to `end`, part x the units parts[x] to parts[x + 1]: unit n is KV head n % U of
    group n // U, the sequences groups[g] .. groups[g + 1]."""
    heads, channels = q.shape[1], q.shape[2]
    kv_heads, width, reach = k.shape[1], r.shape[2], proj_t.shape[0]
    most, longest = 0, 0
    for unit in range(parts[begin], parts[end]):
        first, last = groups[unit // kv_heads], groups[unit // kv_heads + 1]
        most = max(most, starts[last] - starts[first])
        for s in range(first, last):
            longest = max(longest, starts[s + 1] - starts[s])
    longest = longest if window <= 0 else min(longest, window)
    size, wide = most + BLOCK + SLACK, longest + BLOCK + SLACK
    factor = ONE / np.float32(channels)
    keys, high = _room(size, channels + SLACK), BLOCK + 4
    keys_t, values_t = _room(channels, size), _room(channels, size)
    dkeys, dvalues = _room(channels, size), _room(channels, size)
    query, outer = _room(high, channels), _room(high, channels)
    query_t, outer_t = _room(channels + 4, BLOCK), _room(channels + 4, BLOCK)
    branch, branch_t = _room(high, width), _room(width + 4, BLOCK)
    p, ds, part = _room(high, wide), _room(high, wide), _room(channels + 4, wide)
    bias, skewed = _room(8, reach + SLACK), _room(high, reach + SLACK)
    dquery, dbranch = _room(BLOCK + 8, channels + SLACK), _room(BLOCK + 8, width + SLACK)
    dbank, owner = _room(width + 4, reach + SLACK), begin
    positions = np.empty(size, np.int64)
    for unit in range(parts[begin], parts[end]):
        while unit >= parts[owner + 1]:
            owner += 1
        group, u = unit // kv_heads, unit % kv_heads
        first = starts[groups[group]]
        rows = starts[groups[group + 1]] - first
        for s in range(groups[group], groups[group + 1]):
            for n in range(starts[s], starts[s + 1]):
                positions[n - first] = n - starts[s]
        dkeys[:], dvalues[:] = 0.0, 0.0
        _lines(k, first, rows, u, ONE, keys, 0)
        _columns(k, first, rows, u, ONE, keys_t)
        _columns(v, first, rows, u, ONE, values_t)
        for n in range(0, rows, BLOCK):
            count, distances = min(rows - n, BLOCK), 0
            for i in range(count):
                distances = max(distances, positions[n + i] + 1)
            distances = min(distances, longest)
            first_key, near = max(n - distances + 1, 0), max(reach - distances, 0)
            width_here = n + count - first_key
            for h in range(u * heads // kv_heads, (u + 1) * heads // kv_heads):
                _lines(q, first + n, count, h, factor, query, 0)
                _lines(grad, first + n, count, h, ONE, outer, 0)
                _lines(r, first + n, count, h, ONE, branch, 0)
                _columns(q, first + n, count, h, factor, query_t)
                _columns(grad, first + n, count, h, ONE, outer_t)
                _columns(r, first + n, count, h, ONE, branch_t)
                _quads(
                    query,
                    outer,
                    branch,
                    keys,
                    keys_t,
                    values_t,
                    proj,
                    positions,
                    window,
                    n,
                    count,
                    first_key,
                    p,
                    ds,
                    bias,
                    skewed,
                    near,
                    dquery,
                    source,
                )
                _add_to_keys(
                    query_t,
                    outer_t,
                    p,
                    ds,
                    n - first_key,
                    count,
                    width_here,
                    distances,
                    part,
                    dkeys,
                    dvalues,
                    first_key,
                    source,
                )
                for i in range(0, count, 4):
                    span = reach - near
                    product(skewed, i, near, 4, proj_t, near, span, 0, width, 0, dbranch, i, source)
                for b in range(0, width, 4):
                    product(branch_t, b, 0, 4, skewed, 0, count, near, reach, 0, dbank, b, source)
                _add(dbank, width, near, reach, dproj[owner], 0)
                _write_lines(dquery, count, factor, dq, first + n, h)
                _write_lines(dbranch, count, ONE, dr, first + n, h)
        _write_columns(dkeys, rows, dk, first, u)
        _write_columns(dvalues, rows, dv, first, u)


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
    # The bank by key: distance 0 last.
    width, reach = proj_BE.shape
    banks = (
        np.zeros((width, reach + SLACK), np.float32),
        np.zeros((reach, width + SLACK), np.float32),
    )
    banks[0][:, :reach] = exact.widened(proj_BE)[:, ::-1]
    banks[1][:, :width] = banks[0][:, :reach].T
    given = (q, k, v, r, *banks, grad, array(seq_starts_S1), np.asarray(groups), np.asarray(parts))

    def run(first: int, last: int) -> None:
        _backward(*given, window or 0, first, last, dq, dk, dv, dr, dproj, dq)

    longest = max(end - begin for begin, end in pairwise(starts))
    work = 5 * q.size * min(longest, window or longest)
    spread(work, len(parts) - 1, run)
    total = np.zeros(proj_BE.shape, np.float64)
    for part in dproj:
        total = total + part[:, ::-1]
    dtype, proj_grad = q_NHC.dtype, torch.from_numpy(total).to(torch.float32)
    return tensor(dq, dtype), tensor(dk, dtype), tensor(dv, dtype), tensor(dr, dtype), proj_grad
