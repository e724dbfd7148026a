"""Arithmetic that the compiled loops share. Read `exp` and `_products` first: exact.exp and
exact.accumulators are defined by the same operations in the same order.
"""

import numpy as np
from torch import Tensor

from suzuri.kernels.arrays import Array, array
from suzuri.kernels.compiled import SMALL_PRODUCT, loop, number, spread


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
    """y = silu(gate) * up of interleaved columns, unrounded."""
    gates, ups = gate_up[0::2], gate_up[1::2]
    for f in range(y.size):
        gate = gates[f]
        silu = gate / (np.float32(1.0) + np.float32(exp(-gate)))
        y[f] = silu * ups[f]


COLUMNS = 512
"""Columns of a product handled at once: the accumulators of four rows lie in the first cache."""


def _products(x, w, y, first, last):
    """y[:, first:last] = x [M, K] @ w [K, N] in fp64, K in order, one product and one sum at a
    time; rounded to the dtype of y. Four rows and four k at once: quicker, and the same order."""
    rows, k_all = x.shape
    k_four = k_all - k_all % 4
    totals = np.empty((4, min(COLUMNS, last - first)), np.float64)
    for start in range(first, last, COLUMNS):
        # Rows are sliced, so that every index below is a plain loop variable: those vectorise.
        width = min(COLUMNS, last - start)
        stop = start + width
        t0, t1, t2, t3 = totals[0][:width], totals[1][:width], totals[2][:width], totals[3][:width]
        for m in range(0, rows - rows % 4, 4):
            x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
            for n in range(width):
                t0[n], t1[n], t2[n], t3[n] = 0.0, 0.0, 0.0, 0.0
            for k in range(0, k_four, 4):
                w0, w1 = w[k][start:stop], w[k + 1][start:stop]
                w2, w3 = w[k + 2][start:stop], w[k + 3][start:stop]
                a0, a1 = np.float64(x0[k]), np.float64(x0[k + 1])
                a2, a3 = np.float64(x0[k + 2]), np.float64(x0[k + 3])
                b0, b1 = np.float64(x1[k]), np.float64(x1[k + 1])
                b2, b3 = np.float64(x1[k + 2]), np.float64(x1[k + 3])
                c0, c1 = np.float64(x2[k]), np.float64(x2[k + 1])
                c2, c3 = np.float64(x2[k + 2]), np.float64(x2[k + 3])
                d0, d1 = np.float64(x3[k]), np.float64(x3[k + 1])
                d2, d3 = np.float64(x3[k + 2]), np.float64(x3[k + 3])
                for n in range(width):
                    u0, u1 = np.float64(w0[n]), np.float64(w1[n])
                    u2, u3 = np.float64(w2[n]), np.float64(w3[n])
                    t0[n] = (((t0[n] + a0 * u0) + a1 * u1) + a2 * u2) + a3 * u3
                    t1[n] = (((t1[n] + b0 * u0) + b1 * u1) + b2 * u2) + b3 * u3
                    t2[n] = (((t2[n] + c0 * u0) + c1 * u1) + c2 * u2) + c3 * u3
                    t3[n] = (((t3[n] + d0 * u0) + d1 * u1) + d2 * u2) + d3 * u3
            for k in range(k_four, k_all):
                w0 = w[k][start:stop]
                a0, b0 = np.float64(x0[k]), np.float64(x1[k])
                c0, d0 = np.float64(x2[k]), np.float64(x3[k])
                for n in range(width):
                    u0 = np.float64(w0[n])
                    t0[n] += a0 * u0
                    t1[n] += b0 * u0
                    t2[n] += c0 * u0
                    t3[n] += d0 * u0
            y0, y1 = y[m][start:stop], y[m + 1][start:stop]
            y2, y3 = y[m + 2][start:stop], y[m + 3][start:stop]
            for n in range(width):
                y0[n], y1[n], y2[n], y3[n] = t0[n], t1[n], t2[n], t3[n]
        for m in range(rows - rows % 4, rows):
            x0 = x[m]
            for n in range(width):
                t0[n] = 0.0
            for k in range(0, k_four, 4):
                w0, w1 = w[k][start:stop], w[k + 1][start:stop]
                w2, w3 = w[k + 2][start:stop], w[k + 3][start:stop]
                a0, a1 = np.float64(x0[k]), np.float64(x0[k + 1])
                a2, a3 = np.float64(x0[k + 2]), np.float64(x0[k + 3])
                for n in range(width):
                    total = (t0[n] + a0 * np.float64(w0[n])) + a1 * np.float64(w1[n])
                    t0[n] = (total + a2 * np.float64(w2[n])) + a3 * np.float64(w3[n])
            for k in range(k_four, k_all):
                w0, a0 = w[k][start:stop], np.float64(x0[k])
                for n in range(width):
                    t0[n] += a0 * np.float64(w0[n])
            y0 = y[m][start:stop]
            for n in range(width):
                y0[n] = t0[n]


products = loop(_products, fused=True)
"""Of fp32 x and w."""
products_fp64 = loop(_products)


@loop
def grouped_products(x, w, offsets, y, first, last):
    """y[m] = x[m] @ w[e] for offsets[e] <= m < offsets[e + 1], experts first to last - 1."""
    for e in range(first, last):
        low, high = offsets[e], offsets[e + 1]
        if high > low:
            products(x[low:high], w[e], y[low:high], 0, w.shape[2])


@loop
def exps(x, y):
    """y = exp(x), both flat."""
    for i in range(x.size):
        y[i] = exp(x[i])


def multiply(x: Array, w: Array, out: Array) -> None:
    """out [M, N] = x [M, K] @ w [K, N], contiguous, fp32 or fp64; see `_products`."""
    work = out.size * x.shape[1]
    run = products if x.dtype == np.float32 else products_fp64
    if work <= SMALL_PRODUCT:
        run(x, w, out, 0, out.shape[1])
    else:
        spread(work, out.shape[1], lambda low, high: run(x, w, out, low, high))


def exp_all(x: Tensor, y: Tensor) -> None:
    """y = exp(x) for contiguous fp32 CPU tensors."""
    flat, out = array(x).reshape(-1), array(y).reshape(-1)
    exps(flat, out)
