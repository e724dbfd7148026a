"""As reference.py, a block of rows of one sequence and KV head at a time: a tile of keys is read
once for all of them. A key that a row cannot see is an exact identity in every sum, so only those
are read that a row of the block sees.

Read `_attend` first, then `_attend_tile`. A line is a row and one of the query heads that share the
KV head. Lines keep their own order of operations: their first tile, their chunks.
"""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, empty, lasting, tensor
from suzuri.kernels.compiled import lasting_words, loop, number, spread
from suzuri.kernels.kept import kept
from suzuri.kernels.loops import exp, tile_1, tile_2, tile_4, to_bf16
from suzuri.kernels.micro import LANES, WIDTH, make_tile
from suzuri.kernels.relative_attention.reference import CHUNK_GLOBAL, CHUNK_LOCAL, EMPTY_MAX, TILE

LINES = 64
"""Query rows (rows of a block times heads of a KV head) that share a tile of keys."""
HALF = 2 * LANES
half_1, half_2, half_4 = (make_tile(rows, 2) for rows in (1, 2, 4))
INFINITY = 0x7F800000
"""Bits in fp32; those of a finite number are less, without their sign."""
LOT = 16
"""Keys whose shares are computed at once."""
EMPTY, ZERO, ONE, INF = (np.float32(x) for x in (EMPTY_MAX, 0.0, 1.0, np.inf))


@loop
def _fold(total_most, total_weight, total_value, most, weight, value, line, lines):
    """Joins a chunk's partial result to the total and empties it, for some lines."""
    for x in range(line, line + lines):
        new = total_most[x]
        if most[x] > new or np.isnan(most[x]):
            new = most[x]
        a = np.float32(exp(total_most[x] - new))
        b = np.float32(exp(most[x] - new))
        total_most[x], most[x] = new, EMPTY
        total_weight[x], weight[x] = total_weight[x] * a + weight[x] * b, ZERO
        total, part = total_value[x], value[x]
        for c in range(total.size):
            total[c] = total[c] * a + part[c] * b
            part[c] = ZERO


# Rows are sliced, so that the innermost index is a plain loop variable: those loops vectorise. A
# slice that is handed to a function costs more (its references are counted): lines are numbers.


@loop
def product(x, i, left, rows, w, k, count, first, last, shift, out, o, source):
    """out[o : o + rows, first:last] = x[i : i + rows, left : left + count] @ w[k : k + count,
    first + shift : last + shift], at most 4 rows, as micro.make_tile does it.

    Up to WIDTH more columns are written, and of 3 rows a fourth, but none beyond the width of
    `out`; w + shift must be as wide. With all in fp32, for gradients, vectors are twice as long.
    """
    x, out = x[i:, left:], out[o:]
    size = out.itemsize  # exact: bytes of a number
    columns, half, width = out.shape[1], 8 * HALF // size, 8 * WIDTH // size
    n = first // half * half
    while n < last:
        if last - n > half and n + width <= columns:
            if rows == 1:
                tile_1(x, 0, w, k, n + shift, out, n, True, count, source)
            elif rows == 2:
                tile_2(x, 0, w, k, n + shift, out, n, True, count, source)
            else:
                tile_4(x, 0, w, k, n + shift, out, n, True, count, source)
            n += width
        else:
            at = min(n, columns - half)
            if rows == 1:
                half_1(x, 0, w, k, at + shift, out, at, True, count, source)
            elif rows == 2:
                half_2(x, 0, w, k, at + shift, out, at, True, count, source)
            else:
                half_4(x, 0, w, k, at + shift, out, at, True, count, source)
            n += half


@loop
def _gather(k_pages, v_pages, table, s, u, k0, low, high, keys, values):
    """Keys (transposed) and values of a tile; of sequence s. Returns whether the values are all
    finite."""
    size, channels = k_pages.shape[1], keys.shape[0]
    four = channels - channels % 4
    j, largest = low, np.uint32(0)
    while j < high:
        page, offset = table[s, (k0 + j) // size], (k0 + j) % size
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
                x = np.float32(number(row[c]))
                out[c] = x
                largest = max(largest, np.uint32(x.view(np.uint32) << np.uint32(1)))
        j = end
    return largest < np.uint32(INFINITY << 1)


@loop
def _scores(dots, bias, lines, channels, lows, nears, highs, first, last, score):
    """score[:, first:last] of each of `lines` lines: -inf but from its `low` to its `high`, without
    a bias before `near`. The bias joins on the unrounded accumulator: one rounding."""
    factor = 1.0 / channels
    is_power = channels & (channels - 1) == 0
    for m in range(lines):
        out, x, y = score[m][first:last], dots[m][first:last], bias[m][first:last]
        low, near, high = lows[m] - first, nears[m] - first, highs[m] - first
        if is_power:  # exact, as the quotient is
            for i in range(out.size):
                b = y[i]
                s = np.float32(x[i] * factor + (b if i >= near else 0.0))
                out[i] = s if low <= i < high else -INF
        else:
            for i in range(out.size):
                b = y[i]
                s = np.float32(x[i] / channels + (b if i >= near else 0.0))
                out[i] = s if low <= i < high else -INF


@loop
def _highest(score, lines, first, last, tops, lanes):
    """tops = the largest of it and score[first:last]. A NaN is lost here and found again in the sum
    of the shares."""
    for m in range(lines):
        top, row = tops[m], score[m]
        for i in range(LOT):
            lanes[i] = top
        for start in range(first, last, LOT):
            x = row[start : start + LOT]
            for i in range(LOT):
                lanes[i] = x[i] if x[i] > lanes[i] else lanes[i]
        for i in range(8):
            lanes[i] = lanes[i + 8] if lanes[i + 8] > lanes[i] else lanes[i]
        for i in range(4):
            lanes[i] = lanes[i + 4] if lanes[i + 4] > lanes[i] else lanes[i]
        a = lanes[2] if lanes[2] > lanes[0] else lanes[0]
        b = lanes[3] if lanes[3] > lanes[1] else lanes[1]
        tops[m] = b if b > a else a


@loop
def _exps(score, lines, first, last, tops, low_precision, shares):
    """score = exp(score - top) from `first` to `last`; shares are that in fp64, rounded to bf16 if
    `low_precision`."""
    for m in range(lines):
        x, y, top = score[m][first:last], shares[m][first:last], tops[m]
        for i in range(x.size):
            x[i] = exp(x[i] - top)
        if low_precision:
            for i in range(x.size):
                y[i] = to_bf16(x[i])
        else:
            for i in range(x.size):
                y[i] = x[i]


@loop
def _sums(score, lines, first, last, y, sums):
    """Sum of score [TILE] by the tree of exact.tree_sum, zero before `first` and from `last` on; y
    is room for half as many."""
    for m in range(lines):
        x = score[m]
        for i in range(first):
            x[i] = ZERO
        for i in range(last, TILE):
            x[i] = ZERO
        for i in range(TILE // 2):
            y[i] = x[i] + x[i + TILE // 2]
        for i in range(TILE // 4):
            y[i] += y[i + TILE // 4]
        for i in range(TILE // 8):
            y[i] += y[i + TILE // 8]
        for i in range(TILE // 16):
            y[i] += y[i + TILE // 16]
        sums[m] = (y[0] + y[2]) + (y[1] + y[3])


@loop
def _fade(most, weight, line, lines, tops, totals, fades):
    """The new max and weight of `lines` lines from `line` on, and what their old parts fade by."""
    for m in range(lines):
        before, after = most[line + m], tops[m]
        fade = np.float32(exp(before - after)) if before != after else ONE
        fades[m], most[line + m] = fade, after
        weight[line + m] = weight[line + m] * fade + totals[m]


@loop
def _join(value, line, lines, fades, sums):
    for m in range(lines):
        row, new, fade = value[line + m], sums[m], fades[m]
        for c in range(row.size):
            row[c] = row[c] * fade + np.float32(new[c])


@loop
def _copy_lines(x, n, rows, first, heads, out):
    """out = the `heads` heads from `first` on of `rows` rows of x from n on, in fp64."""
    for i in range(rows):
        for g in range(heads):
            a, b = x[n + i][first + g], out[i * heads + g]
            for c in range(a.size):
                b[c] = a[c]


@loop
def _attend_tile(
    query,
    branch,
    keys,
    values,
    proj,
    k0,
    position,
    line,
    end,
    group,
    window,
    low_precision,
    is_finite,
    dots,
    bias,
    shares,
    sums,
    score,
    lanes,
    bounds,
    running,
    most,
    weight,
    value,
    source,
):
    """Lines `line` to `end` of a block that begins at `position` against the tile at k0."""
    channels, width, reach = keys.shape[0], branch.shape[1], proj.shape[1] - 2 * TILE
    lows, nears, highs = bounds[0], bounds[1], bounds[2]
    tops, fades, totals = running[0], running[1], running[2]
    while line < end:
        count = min(4, end - line)
        for m in range(count):
            at = position + (line + m) // group - k0
            lows[m] = 0 if window <= 0 else max(at - window + 1, 0)
            highs[m] = min(at + 1, TILE)
            nears[m] = max(at - reach + 1, lows[m])
            tops[m] = most[line + m]
        low, high = lows[0], highs[count - 1]
        product(query, line, 0, count, keys, 0, channels, low, high, 0, dots, 0, source)
        m = 0
        while m < count:
            # Query rows at the same position: the same columns.
            at = (line + m) // group
            these = min(count, (at + 1) * group - line) - m
            if nears[m] < highs[m]:
                shift = TILE + reach - 1 - (position + at) + k0
                product(
                    branch,
                    line + m,
                    0,
                    these,
                    proj,
                    0,
                    width,
                    nears[m],
                    highs[m],
                    shift,
                    bias,
                    m,
                    source,
                )
            m += these
        first, last = low // LOT * LOT, (high + LOT - 1) // LOT * LOT
        _scores(dots, bias, count, channels, lows, nears, highs, first, last, score)
        _highest(score, count, first, last, tops, lanes)
        _exps(score, count, first, last, tops, low_precision, shares)
        _sums(score, count, first, last, lanes, totals)
        if is_finite or (lows[count - 1] == low and highs[0] == high):
            # Shares of zero add nothing to a sum that began with a positive zero.
            product(shares, 0, low, count, values, low, high - low, 0, channels, 0, sums, 0, source)
        else:
            for m in range(count):
                low, high = lows[m], highs[m]
                product(shares, m, low, 1, values, low, high - low, 0, channels, 0, sums, m, source)
        _fade(most, weight, line, count, tops, totals, fades)
        _join(value, line, count, fades, sums)
        line += 4


@loop
def _empty(most, weight, value, line, lines):
    for x in range(line, line + lines):
        most[x], weight[x] = EMPTY, ZERO
        row = value[x]
        for c in range(row.size):
            row[c] = ZERO


@loop
def _write(weight, value, line, lines, out, n, first):
    for g in range(lines):
        a, b, whole = value[line + g], out[n, first + g], weight[line + g]
        for c in range(a.size):
            # Adding zero is the fold with an empty total: it takes the sign off a zero.
            b[c] = (a[c] + ZERO) / whole


@loop
def _fold_rows(
    total_most, total_weight, total_value, most, weight, value, folded, begin, end, group
):
    """Rows `begin` to `end` of a block go on to the next chunk."""
    for i in range(begin, end):
        if not folded[i]:
            folded[i] = True
            _empty(total_most, total_weight, total_value, i * group, group)
        _fold(total_most, total_weight, total_value, most, weight, value, i * group, group)


@loop
def _attend(
    q,
    r,
    proj,
    k_pages,
    v_pages,
    table,
    firsts,
    starts,
    blocks,
    window,
    low_precision,
    begin,
    end,
    out,
):
    """Units `begin` to `end`: unit x is block x % X for KV head x // X."""
    channels, group = q.shape[2], q.shape[1] // k_pages.shape[2]
    chunk = CHUNK_GLOBAL if window <= 0 else CHUNK_LOCAL
    most_rows = 0
    for b in range(blocks.shape[0]):
        most_rows = max(most_rows, blocks[b, 2])
    room = most_rows * group + 4
    padded = (channels + HALF - 1) // HALF * HALF
    query, branch = np.zeros((room, channels), np.float64), np.zeros((room, r.shape[2]), np.float64)
    keys, values = np.zeros((channels, TILE), np.float64), np.zeros((TILE, padded), np.float64)
    dots, bias = np.empty((4, TILE), np.float64), np.empty((8, TILE), np.float64)
    shares, sums = np.empty((4, TILE), np.float64), np.empty((4, padded), np.float64)
    score, lanes = np.empty((4, TILE), np.float32), np.empty(TILE // 2, np.float32)
    bounds, running = np.empty((3, 4), np.int64), np.empty((3, 4), np.float32)
    most, weight = np.empty(room, np.float32), np.empty(room, np.float32)
    value, folded = np.empty((room, channels), np.float32), np.empty(most_rows, np.bool_)
    total_most, total_weight = np.empty(room, np.float32), np.empty(room, np.float32)
    total_value = np.empty((room, channels), np.float32)
    for unit in range(begin, end):
        u, b = unit // blocks.shape[0], unit % blocks.shape[0]
        s, n, rows = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        position = firsts[s] + n - starts[s]
        _copy_lines(q, n, rows, u * group, group, query)
        _copy_lines(r, n, rows, u * group, group, branch)
        _empty(most, weight, value, 0, rows * group)
        for i in range(rows):
            folded[i] = False
        first_key = 0 if window <= 0 else max(position - window + 1, 0)
        for k0 in range(first_key // TILE * TILE, position + rows, TILE):
            # Rows that see a key of this tile, and the first of them that sees none before it.
            first, last, fresh = max(k0 - position, 0), rows, rows
            if window > 0:
                last = min(last, k0 + TILE - 1 + window - position)
                fresh = min(last, k0 - 1 + window - position)
            if k0 % chunk == 0 and k0 > 0:
                _fold_rows(
                    total_most,
                    total_weight,
                    total_value,
                    most,
                    weight,
                    value,
                    folded,
                    first,
                    fresh,
                    group,
                )
            low = 0 if window <= 0 else max(position + first - window + 1 - k0, 0)
            high = min(position + last - k0, TILE)
            is_finite = _gather(k_pages, v_pages, table, s, u, k0, low, high, keys, values)
            _attend_tile(
                query,
                branch,
                keys,
                values,
                proj,
                k0,
                position,
                first * group,
                last * group,
                group,
                window,
                low_precision,
                is_finite,
                dots,
                bias,
                shares,
                sums,
                score,
                lanes,
                bounds,
                running,
                most,
                weight,
                value,
                q,
            )
        for i in range(rows):
            if folded[i]:
                _fold(total_most, total_weight, total_value, most, weight, value, i * group, group)
                _write(total_weight, total_value, i * group, group, out, n + i, u * group)
            else:
                _write(weight, value, i * group, group, out, n + i, u * group)


@loop
def _blocks(starts, most):
    """(sequence, first row, rows) of each block, of at most `most` rows."""
    count = 0
    for s in range(starts.size - 1):
        count += (starts[s + 1] - starts[s] + most - 1) // most
    blocks = np.empty((count, 3), np.int64)
    count = 0
    for s in range(starts.size - 1):
        for n in range(starts[s], starts[s + 1], most):
            blocks[count, 0], blocks[count, 1] = s, n
            blocks[count, 2] = min(most, starts[s + 1] - n)
            count += 1
    return blocks


def _reversed(proj_BE: Tensor) -> Array:
    """fp64, the columns in reverse (a later key is nearer), between TILE columns of zeros."""
    width, reach = proj_BE.shape
    padded = np.zeros((width, reach + 2 * TILE), np.float64)
    padded[:, TILE : TILE + reach] = array(exact.widen(proj_BE))[:, ::-1]
    return padded


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
    blocks = _blocks(starts, max(LINES * k_pages_PTUC.shape[2] // heads, 1))
    if not len(blocks):
        return tensor(out, q_NHC.dtype)
    given = (
        array(exact.widen(q_NHC).contiguous()),
        array(exact.widen(r_NHB).contiguous()),
        kept(_reversed, proj_BE, num_bytes=8 * proj_BE.numel()),
        lasting_words(k_pages_PTUC.contiguous()),
        lasting_words(v_pages_PTUC.contiguous()),
        lasting(page_table_SM.contiguous()),
        lasting(first_positions_S),
        starts,
        blocks,
        window or 0,
        q_NHC.dtype == torch.bfloat16,
    )
    keys = page_table_SM.shape[1] * k_pages_PTUC.shape[1]
    work = 2 * rows * heads * channels * min(keys, window or keys)
    units = len(blocks) * k_pages_PTUC.shape[2]
    spread(work, units, lambda begin, end: _attend(*given, begin, end, out))
    return tensor(out, q_NHC.dtype)
