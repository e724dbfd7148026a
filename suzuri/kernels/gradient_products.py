"""Products for gradients: fp32 sums, equal from run to run and on any number of threads, no more.

Of many small matrices at once, where a library's call for each costs as much as its arithmetic.
"""

import numpy as np

from suzuri.kernels.compiled import loop
from suzuri.kernels.loops import aligned, tile_1, tile_2, tile_3, tile_4
from suzuri.kernels.micro import LANES, WIDTH, make_tile

PANEL = 2 * WIDTH
"""Columns of a panel: of fp32 numbers a vector holds twice as many."""
HALF = 4 * LANES
"""Columns of a narrow one, of two vectors."""
ROWS, DEPTH = 128, 128
"""Rows and k handled at once."""
half_1, half_2, half_3, half_4 = (make_tile(rows, 2) for rows in (1, 2, 3, 4))
turned_1, turned_2, turned_3, turned_4 = (make_tile(n, is_turned=True) for n in (1, 2, 3, 4))
low_1, low_2, low_3, low_4 = (make_tile(n, 2, is_turned=True) for n in (1, 2, 3, 4))


@loop
def _rows(x, rows, panel, count, sums, fresh):
    """sums[:rows] += x[:rows, :count] @ panel[:count], or becomes that if `fresh`."""
    wide, four = panel.shape[1] == PANEL, rows - rows % 4
    for i in range(0, four, 4):
        if wide:
            tile_4(x, i, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            half_4(x, i, panel, 0, 0, sums, 0, fresh, count, x)
    if rows - four == 1:
        if wide:
            tile_1(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            half_1(x, four, panel, 0, 0, sums, 0, fresh, count, x)
    elif rows - four == 2:
        if wide:
            tile_2(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            half_2(x, four, panel, 0, 0, sums, 0, fresh, count, x)
    elif rows - four == 3:
        if wide:
            tile_3(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            half_3(x, four, panel, 0, 0, sums, 0, fresh, count, x)


@loop
def _columns(x, rows, panel, count, sums, fresh):
    """sums[:rows] += x[:count, :rows] transposed @ panel[:count], or becomes that if `fresh`."""
    wide, four = panel.shape[1] == PANEL, rows - rows % 4
    for i in range(0, four, 4):
        if wide:
            turned_4(x, i, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            low_4(x, i, panel, 0, 0, sums, 0, fresh, count, x)
    if rows - four == 1:
        if wide:
            turned_1(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            low_1(x, four, panel, 0, 0, sums, 0, fresh, count, x)
    elif rows - four == 2:
        if wide:
            turned_2(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            low_2(x, four, panel, 0, 0, sums, 0, fresh, count, x)
    elif rows - four == 3:
        if wide:
            turned_3(x, four, panel, 0, 0, sums, 0, fresh, count, x)
        else:
            low_3(x, four, panel, 0, 0, sums, 0, fresh, count, x)


@loop
def fp32_room(rows, columns):
    """Room for fp32 numbers that begins with a line of a cache."""
    flat = aligned(1, (rows * columns + 1) // 2).reshape(-1).view(np.float32)
    return flat[: rows * columns].reshape(rows, columns)


@loop
def _copy(w, k, count, n, width, panel):
    """panel[:count] = rows of w from k on, `width` columns from n on; the others are zero."""
    for i in range(count):
        row, out = w[k + i][n : n + width], panel[i]
        for c in range(width):
            out[c] = row[c]
        for c in range(width, panel.shape[1]):
            out[c] = np.float32(0.0)


@loop
def _write(sums, rows, width, y, m, n):
    for i in range(rows):
        out, row = y[m + i][n : n + width], sums[i]
        for c in range(width):
            out[c] = row[c]


@loop
def _times(x, w, y, first, last, turned):
    """y[first:last] of y [M, N] = x @ w [K, N], of x [M, K], or `turned` x [K, M]."""
    depth, columns, wide = w.shape[0], w.shape[1], fp32_room(DEPTH, PANEL)
    narrow, sums = fp32_room(DEPTH, HALF), fp32_room(min(last - first, ROWS), PANEL)
    for m in range(first, last, ROWS):
        height = min(last - m, ROWS)
        for n in range(0, columns, PANEL):
            width = min(columns - n, PANEL)
            panel = wide if width > HALF else narrow
            for k in range(0, depth, DEPTH):
                count = min(depth - k, DEPTH)
                _copy(w, k, count, n, width, panel)
                is_whole = width == panel.shape[1]
                out = y[m : m + height, n : n + width] if is_whole else sums[:height, :]
                if turned:
                    _columns(x[k : k + count, m : m + height], height, panel, count, out, k == 0)
                else:
                    _rows(x[m : m + height, k : k + count], height, panel, count, out, k == 0)
            if width < panel.shape[1]:
                _write(sums, height, width, y, m, n)


@loop
def rows_times(x, w, y):
    """y [M, N] = x [M, K] @ w [K, N], all fp32, the numbers of a row side by side."""
    _times(x, w, y, 0, x.shape[0], False)


@loop
def columns_times(x, w, y, first, last):
    """y[first:last] of y [M, N] = x [K, M] transposed @ w [K, N]."""
    _times(x, w, y, first, last, True)
