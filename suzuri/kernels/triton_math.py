"""Arithmetic that every Triton kernel shares, so that two kernels give one number the same bits.

Where a sum of products is left to the compiler it may or may not become a fused multiply-add, and
two callers may be compiled differently. So: call these functions, write `tl.fma` where a fused one
is meant, and launch what multiplies and adds in its own code with `enable_fp_fusion=False` (a
launch option of Triton; the rounding of every product is then its own, as in the references).
Everything here is in fp32: cast first (`x.to(tl.float32)`).
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LARGEST_TREE = tl.constexpr(16)
"""log2 of the longest row of `tree_sum`."""
EMPTY_MAX = tl.constexpr(-3.4028234663852886e38)
"""The max of nothing: finite (the least fp32), so that exp(-inf - max) is 0 and not NaN."""


@triton.jit
def tree_sum(x):
    """Sum over the last dim of x [R, C], C a power of two: [R].

    The tree of `exact.tree_sum`: x[:, j] + x[:, j + C/2], then the same of the C/2 sums. A row that
    is shorter than C is padded with zeros. Each level is a reduction over exactly two elements, and
    a + b = b + a, so that layout, warps and rows cannot change a bit.
    """
    for _ in tl.static_range(LARGEST_TREE):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the division rounded to nearest."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), the division rounded to nearest."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def logsigmoid(x):
    """log(1 / (1 + exp(-x))) without overflow: within 1e-7 absolutely, not relatively."""
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def chunk_stats(x):
    """(max [R], fixed-tree sum [R] of exp(x - max)) of one vocabulary chunk x [R, C].

    -inf (a masked id, or the padding of a short chunk) adds nothing; the max is never below
    EMPTY_MAX.
    """
    most = tl.maximum(tl.max(x, axis=1), EMPTY_MAX)
    return most, tree_sum(tl.exp(x - most[:, None]))


@triton.jit
def fold_chunk(old_max, total, chunk_max, chunk_sum):
    """Folds the stats of the next chunk into (max, total); start with EMPTY_MAX and 0."""
    new_max = tl.maximum(old_max, chunk_max)
    rest = chunk_sum * tl.exp(chunk_max - new_max)
    return new_max, tl.fma(total, tl.exp(old_max - new_max), rest)
