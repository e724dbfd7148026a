"""Arithmetic that the compiled loops share. Read `exp` and `products` first: exact.exp and
exact.accumulators are defined by the same operations in the same order.
"""

import numpy as np
from torch import Tensor

from suzuri.kernels.arrays import Array, array
from suzuri.kernels.compiled import SMALL_PRODUCT, loop, number, share, spread
from suzuri.kernels.micro import LANES, VECTORS, WIDTH, add_product, make_tile

BLOCKS_AT_ONCE = 128
"""Blocks of words, 2 MB together, that a thread reads before it looks for more."""


@loop
def exp(x):
    """exp of a number in fp64, by the operations of exact.exp."""
    x = np.float64(x)
    x = max(x, -150.0)
    x = min(x, 130.0)
    shifted = x * 1.4426950408889634 + 6755399441055744.0
    power = shifted - 6755399441055744.0
    rest = x - power * 0.6931471805599453
    y = 1 / 40320
    y = y * rest + 1 / 5040
    y = y * rest + 1 / 720
    y = y * rest + 1 / 120
    y = y * rest + 1 / 24
    y = y * rest + 1 / 6
    y = y * rest + 1 / 2
    y = y * rest + 1.0
    y = y * rest + 1.0
    bits = (np.float64(shifted).view(np.int64) + 1023) << 52
    return y * np.int64(bits).view(np.float64)


@loop
def to_bf16(x):
    """An fp32 number rounded to bf16, as fp32."""
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return x if np.isnan(x) else np.uint32(rounded).view(np.float32)


@loop
def tree(x, n):
    """Sum of x[:n], which it overwrites, by the tree of exact.tree_sum."""
    half = 1
    while half * 2 < n:
        half *= 2
    while half:
        upper = x[half:n]
        for i in range(upper.size):
            x[i] += upper[i]
        n = half
        half //= 2
    return x[0]


@loop
def round_row(x):
    """x rounded to bf16 in place."""
    for i in range(x.size):
        x[i] = to_bf16(x[i])


@loop
def norm_row(x, weight, eps, squares, y):
    """y = x normed (`rms_norm`), unrounded; y may be x. `squares` is room for as many numbers."""
    width = x.size
    for i in range(width):
        squares[i] = x[i] * x[i]
    mean = tree(squares, width) / np.float32(width)
    scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    for i in range(width):
        y[i] = x[i] * scale * weight[i]


@loop
def add_tap(out, weight, source, first):
    """One tap of a short convolution: begins the sum, or joins it."""
    if first:
        for c in range(out.size):
            out[c] = weight[c] * number(source[c])
    else:
        for c in range(out.size):
            out[c] += weight[c] * number(source[c])


@loop
def swiglu_row(gate_up, y):
    """y = silu(gate) * up of interleaved columns, unrounded. Exponentials of what lies side by side
    vectorise."""
    gates, ups = gate_up[0::2], gate_up[1::2]
    for f in range(y.size):
        y[f] = gates[f]
    for f in range(y.size):
        y[f] = y[f] / (np.float32(1.0) + np.float32(exp(-y[f])))
    for f in range(y.size):
        y[f] = y[f] * ups[f]


tile_1, tile_2, tile_3, tile_4 = (make_tile(rows) for rows in (1, 2, 3, 4))
broad_2 = make_tile(2, 2 * VECTORS)
thin_1, thin_2, thin_3, thin_4 = (make_tile(rows, 1) for rows in (1, 2, 3, 4))


@loop
def _tiles(x, rows, w, k, n, totals, j, fresh, count, source):
    """A panel of WIDTH columns (micro.make_tile), all rows."""
    four = rows - rows % 4
    for i in range(0, four, 4):
        tile_4(x, i, w, k, n, totals, j, fresh, count, source)
    if rows - four == 1:
        tile_1(x, four, w, k, n, totals, j, fresh, count, source)
    elif rows - four == 2:
        tile_2(x, four, w, k, n, totals, j, fresh, count, source)
    elif rows - four == 3:
        tile_3(x, four, w, k, n, totals, j, fresh, count, source)


@loop
def _thin_tiles(x, rows, w, k, n, totals, j, fresh, count, source):
    """A panel of LANES columns."""
    four = rows - rows % 4
    for i in range(0, four, 4):
        thin_4(x, i, w, k, n, totals, j, fresh, count, source)
    if rows - four == 1:
        thin_1(x, four, w, k, n, totals, j, fresh, count, source)
    elif rows - four == 2:
        thin_2(x, four, w, k, n, totals, j, fresh, count, source)
    elif rows - four == 3:
        thin_3(x, four, w, k, n, totals, j, fresh, count, source)


@loop
def _widen(x, m, rows, k, count, x64):
    """x64[:rows, :count] = rows of x from m on, columns from k on."""
    for i in range(rows):
        row, out = x[m + i][k : k + count], x64[i]
        for c in range(count):
            out[c] = row[c]


@loop
def _pack(w, k, count, n, width, panel):
    """panel[:count] = rows of w from k on, `width` columns from n on; the others are zero."""
    for i in range(count):
        row, out = w[k + i][n : n + width], panel[i]
        for c in range(width):
            out[c] = row[c]
        for c in range(width, out.size):
            out[c] = 0.0


@loop
def _round(totals, rows, whole, shift, y, m, start, width):
    """Rows m and following of y, `width` columns from `start` on. From column `whole` on, what
    belongs there lies `shift` columns to the right."""
    for i in range(rows):
        out = y[m + i][start : start + width]
        row, last = totals[i], totals[i][whole + shift : width + shift]
        for c in range(whole):
            out[c] = row[c]
        rest = out[whole:]
        for c in range(last.size):
            rest[c] = last[c]


ROWS, COLUMNS, DEPTH = 128, 512, 64
"""Rows, columns and k of a product handled at once: what is read again lies in a cache."""
PACKED_DEPTH = 128
"""The k at once of weights that are copied first."""
MANY_ROWS = 24
"""From so many rows on a panel of weights is copied first: fp64, each row beside the next."""
WIDE = 1024
"""Fewer k at once of wider weights: their rows lie far apart, often in the same places of a cache.
"""


APART = 8
"""Columns between the rows of sums."""


@loop
def aligned(rows, columns):
    """Room for fp64 numbers that begins with a line of a cache."""
    room = np.empty(rows * columns + 8, np.float64)
    first = (-room.ctypes.data // 8) % 8  # exact: an address
    return room[first : first + rows * columns].reshape(rows, columns)


@loop
def _add(x64, rows, w, k, count, start, width, step, packed, panel, totals, source):
    """totals[:rows, :width] += x64[:rows, :count] @ w[k : k + count, start : start + width], or
    becomes that if k is 0; panel by panel."""
    for j in range(0, width, step):
        # No panel ends behind the last column: it begins earlier, and is computed again.
        n, fresh = min(start + j, w.shape[1] - step), k == 0
        if packed:
            _pack(w, k, count, start + j, min(step, width - j), panel)
            if step == WIDTH:
                _tiles(x64, rows, panel, 0, 0, totals, j, fresh, count, source)
            else:
                _thin_tiles(x64, rows, panel, 0, 0, totals, j, fresh, count, source)
        elif step == WIDTH:
            _tiles(x64, rows, w, k, n, totals, j, fresh, count, source)
        elif step == LANES:
            _thin_tiles(x64, rows, w, k, n, totals, j, fresh, count, source)
        else:
            broad_2(x64, 0, w, k, n, totals, j, fresh, count, source)


@loop
def _row_alone(x, w, y, first, last):
    """`products` for a row, which takes as long as reading the weights does: in rows, as they lie.
    Four k at once: quicker, and the same order."""
    four = x.size - x.size % 4
    totals = np.empty(min(COLUMNS, last - first), np.float64)
    for start in range(first, last, COLUMNS):
        # Rows are sliced, so that every index below is a plain loop variable: those vectorise.
        stop = min(start + COLUMNS, last)
        sums, out = totals[: stop - start], y[start:stop]
        for n in range(sums.size):
            sums[n] = 0.0
        for k in range(0, four, 4):
            w0, w1 = w[k][start:stop], w[k + 1][start:stop]
            w2, w3 = w[k + 2][start:stop], w[k + 3][start:stop]
            a0, a1 = np.float64(x[k]), np.float64(x[k + 1])
            a2, a3 = np.float64(x[k + 2]), np.float64(x[k + 3])
            for n in range(sums.size):
                total = add_product(add_product(sums[n], a0, w0[n], x), a1, w1[n], x)
                sums[n] = add_product(add_product(total, a2, w2[n], x), a3, w3[n], x)
        for k in range(four, x.size):
            w0, a0 = w[k][start:stop], np.float64(x[k])
            for n in range(sums.size):
                sums[n] = add_product(sums[n], a0, w0[n], x)
        for n in range(sums.size):
            out[n] = sums[n]


@loop
def products(x, w, y, first, last):
    """y[:, first:last] = x [M, K] @ w [K, N] in fp64, K in order, one product and one sum at a
    time; rounded to the dtype of y. x and w are both fp32 or both fp64."""
    (rows, k_all), columns = x.shape, w.shape[1]
    if rows == 1:
        _row_alone(x[0], w, y[0], first, last)
        return
    step = WIDTH if columns >= WIDTH else LANES
    if rows == 2 and columns >= 2 * WIDTH:
        step = 2 * WIDTH  # of two rows there would be too few sums side by side
    packed = columns < LANES or (rows >= MANY_ROWS and step == WIDTH)
    depth = DEPTH if columns <= WIDE else DEPTH // 2
    depth = PACKED_DEPTH if packed else depth
    height, span = min(rows, ROWS), min(last - first, COLUMNS)
    x64 = aligned(height, min(depth, k_all))
    totals = aligned(height, (span + step - 1) // step * step + APART)
    panel = aligned(depth, step) if packed else totals
    if k_all == 0:
        totals[:] = 0.0
    for m in range(0, rows, ROWS):
        height = min(rows - m, ROWS)
        for start in range(first, last, COLUMNS):
            width = min(last - start, COLUMNS)
            for k in range(0, k_all, depth):
                count = min(depth, k_all - k)
                _widen(x, m, height, k, count, x64)
                _add(x64, height, w, k, count, start, width, step, packed, panel, totals, x)
            whole = (width - 1) // step * step
            shift = 0 if packed else max(start + whole + step - columns, 0)
            _round(totals, height, whole, shift, y, m, start, width)


@loop
def exps(x, y):
    """y = exp(x), both flat."""
    for i in range(x.size):
        y[i] = exp(x[i])


def multiply(x: Array, w: Array, out: Array) -> None:
    """out [M, N] = x [M, K] @ w [K, N], contiguous, both fp32 or both fp64; see `products`."""
    (rows, columns), work = out.shape, out.size * x.shape[1]
    if work <= SMALL_PRODUCT:
        products(x, w, out, 0, columns)
        return

    def some_rows(low: int, high: int) -> None:
        part = slice(4 * low, 4 * high)
        products(x[part], w, out[part], 0, columns)

    def some_columns(low: int, high: int) -> None:
        products(x, w, out, WIDTH * low, min(WIDTH * high, columns))

    if rows > columns:
        spread(work, -(-rows // 4), some_rows)
    else:
        spread(work, -(-columns // WIDTH), some_columns)


def exp_all(x: Tensor, y: Tensor) -> None:
    """y = exp(x) for contiguous fp32 CPU tensors."""
    flat, out = array(x).reshape(-1), array(y).reshape(-1)
    exps(flat, out)


def block_sums(words: Array, keys: Array, found: Array) -> None:
    """int64 `found` [blocks]: of int32 `words`, as many at a time as there are keys, each times its
    key, modulo 2^64."""

    def some(first: int, last: int) -> None:
        _block_sums(words, keys, found, first, last)

    share(found.size, some, at_once=BLOCKS_AT_ONCE)


@loop
def _block_sums(words, keys, found, first, last):
    """Four at a time: a key is loaded once for all, and memory is read in several places."""
    n, block = keys.size, first
    while block + 4 <= last and (block + 4) * n <= words.size:
        start = block * n
        a = words[start : start + n]
        b = words[start + n : start + 2 * n]
        c = words[start + 2 * n : start + 3 * n]
        d = words[start + 3 * n : start + 4 * n]
        s, t, u, v = 0, 0, 0, 0
        for i in range(n):
            key = keys[i]
            s += a[i] * key
            t += b[i] * key
            u += c[i] * key
            v += d[i] * key
        found[block], found[block + 1], found[block + 2], found[block + 3] = s, t, u, v
        block += 4
    while block < last:
        own = words[block * n : (block + 1) * n]
        total = 0
        for i in range(own.size):
            total += own[i] * keys[i]
        found[block] = total
        block += 1
