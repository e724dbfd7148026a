"""Matrix products on a GPU: K in order, fp32 accumulator, one rounding (docs/exactness.md rule 1).

`accumulators` is the one inner loop, also of grouped_gemm. The tensor cores add a tile's products
in ascending K whatever the tile is, so a `Tile` decides the speed and never a bit; K is never
split. Many rows go to the vendor library where buckets.py has seen its bits to be ours.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from suzuri.kernels.matmul import buckets


class Tile(NamedTuple):
    """How a product is cut up: rows of x, rows of the weight, length of K per step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False
    """The weight's rows are the M of the matrix instruction: for few rows of x."""
    descriptors: bool = False
    """Loads by tensor descriptor (the copy engine of newer GPUs) where operands allow it."""


@triton.jit
def accumulators(
    x,
    w,
    is_row,
    is_column,
    x_stride,
    w_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """fp32 x [BM, K] @ w [BN, K]^T, [BM, BN], or its transpose if SWAPPED.

    x and w point at the first row of the tile; is_row [BM] and is_column [BN] say which rows exist
    (the others are zeros). Rows are x_stride and w_stride apart and contiguous.
    """
    in_k = tl.arange(0, BK)
    x_at = x + tl.arange(0, BM)[:, None] * x_stride + in_k[None, :]
    w_at = w + tl.arange(0, BN)[:, None] * w_stride + in_k[None, :]
    if SWAPPED:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            x_tile = tl.load(x_at, mask=is_row[:, None], other=0.0)
            w_tile = tl.load(w_at, mask=is_column[:, None], other=0.0)
        else:
            rest = in_k[None, :] < K - k
            x_tile = tl.load(x_at, mask=is_row[:, None] & rest, other=0.0)
            w_tile = tl.load(w_at, mask=is_column[:, None] & rest, other=0.0)
        if SWAPPED:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
        x_at += BK
        w_at += BK
    return acc


@triton.jit
def accumulators_by_descriptor(
    x,
    w,
    row,
    column,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """As `accumulators`, x and w being descriptors of matrices with blocks [BM, BK] and [BN, BK].

    Rows behind the tile's own are whatever follows in memory (zeros behind the end): they meet no
    row of the tile, and are not stored.
    """
    if SWAPPED:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        x_tile = x.load([row, k])
        w_tile = w.load([column, k])
        if SWAPPED:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    return acc


@triton.jit
def store_tile(
    y,
    acc,
    is_row,
    is_column,
    y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """Rounds `accumulators` once and writes them; y points at the tile's first element."""
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    if SWAPPED:
        at = y + m[None, :] * y_stride + n[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), is_row[None, :] & is_column[:, None])
    else:
        at = y + m[:, None] * y_stride + n[None, :]
        tl.store(at, acc.to(y.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def tile_of(program, num_m, num_n, GROUP: tl.constexpr):
    """(m, n) of a program: columns of GROUP row tiles, so that both operands stay in the L2."""
    in_group = GROUP * num_n
    first = program // in_group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    return first + program % in_group % height, program % in_group // height


@triton.jit(do_not_specialize=["M", "scale"])
def _matmul(
    x,
    w,
    y,
    M,
    N,
    x_stride,
    w_stride,
    scale,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    row, column = tile_m.to(tl.int64) * BM, tile_n.to(tl.int64) * BN
    is_row = row + tl.arange(0, BM) < M
    is_column = column + tl.arange(0, BN) < N
    if DESCRIPTORS:
        acc = accumulators_by_descriptor(x, w, tile_m * BM, tile_n * BN, K, BM, BN, BK, SWAPPED)
    else:
        acc = accumulators(
            x + row * x_stride,
            w + column * w_stride,
            is_row,
            is_column,
            x_stride,
            w_stride,
            K,
            BM,
            BN,
            BK,
            SWAPPED,
        )
    if SCALED:
        acc = acc * scale
    store_tile(y + row * N + column, acc, is_row, is_column, N, BM, BN, SWAPPED)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; an H200's where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_for(m: int, n: int, dtype: torch.dtype, units: int) -> Tile:
    """The tile for `m` rows and `n` columns on `units` multiprocessors (measured on an H200:
    benchmarks/results/kernels-matmul.json)."""
    if dtype == torch.float32:
        return Tile(16, 64, 32, 4, 2, True) if m <= 16 else Tile(64, 64, 32, 4, 2)
    is_wide = n > 64 * units
    if m <= 16:
        if is_wide:
            return Tile(16, 64, 128, 4, 4, True)
        return Tile(16, 64, 256, 4, 5, True, True)
    if m <= 32:
        return Tile(32, 64, *((128, 4, 3) if is_wide else (256, 4, 4)), True, True)
    if m <= 64 and is_wide:
        return Tile(64, 64, 128, 4, 3, True, True)
    if m <= 64:
        few = 0.6 * units
        narrow = 32 if n > 32 * few else 16
        return SHORT[64 if n > 64 * few else narrow]
    return min(LARGE, key=lambda tile: cost(tile, m, n, units))


SHORT = {
    64: Tile(64, 64, 128, 4, 5, False, True),
    32: Tile(64, 32, 256, 4, 4, False, True),
    16: Tile(64, 16, 256, 4, 4, False, True),
}
LARGE = {
    Tile(128, 256, 64, 8, 4, False, True): (1, 64.0),
    Tile(128, 128, 64, 4, 5, False, True): (1, 33.0),
    Tile(64, 128, 64, 4, 4, False, True): (2, 40.0),
    Tile(128, 64, 128, 4, 4, False, True): (1, 24.0),
    Tile(64, 64, 128, 4, 3, True, True): (2, 29.3),
    SHORT[64]: (1, 20.0),
    SHORT[32]: (1, 14.4),
    SHORT[16]: (1, 9.0),
}
"""Tiles for many rows: how many a multiprocessor holds at a time, and how long those take
(measured, microseconds at K = 6144)."""


def fitted(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tile:
    """`tile` with as many steps in flight, and at last as long ones, as the shared memory holds."""
    step = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
    stages, depth = tile.stages, tile.depth
    while stages * step > shared_bytes(device) and (stages > 2 or depth > 32):
        if stages > 2:
            stages -= 1
        else:
            depth, step = depth // 2, step // 2
    return tile._replace(stages=stages, depth=depth)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may fill; an H200's where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 220 << 10
    total = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return total - (4 << 10)  # the compiler's own


def cost(tile: Tile, m: int, n: int, units: int) -> float:
    """The time of a product, by how often the multiprocessors are filled."""
    held, time = LARGE[tile]
    tiles = -(-m // tile.rows) * -(-n // tile.columns)
    return -(-tiles // (held * units)) * time


def launch(x_NK: Tensor, weight_MK: Tensor, out_NM: Tensor, scale: float, tile: Tile) -> None:
    """Our kernel into `out_NM`, a contiguous tensor or a run of its rows; operands with contiguous
    rows."""
    m, k = x_NK.shape
    n = weight_MK.shape[0]
    tile = fitted(tile, x_NK.dtype, x_NK.device)
    grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
    by_descriptor = tile.descriptors and may_describe(x_NK) and may_describe(weight_MK)
    _matmul[grid](
        described(x_NK, tile.rows, tile.depth) if by_descriptor else x_NK,
        described(weight_MK, tile.columns, tile.depth) if by_descriptor else weight_MK,
        out_NM,
        m,
        n,
        x_NK.stride(0),
        weight_MK.stride(0),
        scale,
        K=k,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SWAPPED=tile.swapped,
        DESCRIPTORS=by_descriptor,
        SCALED=scale != 1.0,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def may_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made of the rows of `x` [..., K] here: rows aligned to 16
    bytes, and a GPU that has them."""
    strides = x.stride()
    return (
        strides[-1] == 1
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides[:-1])
        and x.data_ptr() % 16 == 0
        and has_descriptors(x.device)
    )


@cache
def has_descriptors(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of the matrix x for blocks [rows, columns]."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def rows_contiguous(x: Tensor) -> Tensor:
    """`x`, copied if the elements of a row are not neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def ours(
    x_NK: Tensor,
    weight_MK: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """The product by our kernel alone, whatever the shape."""
    (m, k), n = x_NK.shape, weight_MK.shape[0]
    if 0 in (m, n, k):
        return x_NK.new_zeros(m, n, dtype=out_dtype)
    x_NK, weight_MK = rows_contiguous(x_NK), rows_contiguous(weight_MK)
    out_NM = x_NK.new_empty(m, n, dtype=out_dtype)
    chosen = tile or tile_for(m, n, x_NK.dtype, num_multiprocessors(x_NK.device))
    launch(x_NK, weight_MK, out_NM, scale, chosen)
    return out_NM


def matmul(x_NK: Tensor, weight_MK: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """The contract of the op: runs of rows at a tested bucket by the library, the rest by us."""
    (m, k), n = x_NK.shape, weight_MK.shape[0]
    is_plain = scale == 1.0 and buckets.is_worth_asking(m)
    if not is_plain or not buckets.may_serve(x_NK, weight_MK, out_dtype):
        return ours(x_NK, weight_MK, scale, out_dtype)
    equal = buckets.equal_buckets(n, k, x_NK.dtype, out_dtype, x_NK.device)
    out_NM = x_NK.new_empty(m, n, dtype=out_dtype)
    done = 0
    for rows in buckets.runs(m, equal):
        run = slice(done, done + rows)
        buckets.vendor(x_NK[run], weight_MK, out_NM[run])
        done += rows
    if done < m:
        tile = tile_for(m - done, n, x_NK.dtype, num_multiprocessors(x_NK.device))
        launch(x_NK[done:], weight_MK, out_NM[done:], 1.0, tile)
    return out_NM
