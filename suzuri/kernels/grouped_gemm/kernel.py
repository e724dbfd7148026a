"""All experts' products in one launch: every program finds its expert from the offsets on the GPU.

The inner loop is that of matmul, so a row has the bits of a plain product with its expert's weight.
The grid covers the most row tiles there can be for M rows and E experts; the rest return at once.
`of_inputs` and `of_weights` are the two products of the backward, each tile with one owner.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.matmul.kernel import (
    Tile,
    accumulators,
    accumulators_by_descriptor,
    described,
    fitted,
    may_describe,
    rows_contiguous,
    store_tile,
    tile_of,
)


@triton.jit
def _owner(offsets, tile, E: tl.constexpr, E_PADDED: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile of BM rows (E for one too many), and the number of tiles before its."""
    experts = tl.arange(0, E_PADDED)
    begin_E = tl.load(offsets + experts, mask=experts < E, other=0)
    end_E = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles_E = ((end_E - begin_E + (BM - 1)) // BM).to(tl.int32)
    before_E = tl.cumsum(tiles_E, axis=0)
    expert = tl.sum((before_E <= tile).to(tl.int32), axis=0)
    return expert, tl.sum(tl.where(experts < expert, tiles_E, 0), axis=0)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm(
    x,
    w,
    y,
    offsets,
    num_tiles,
    N,
    x_stride,
    expert_stride,
    w_stride,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, tile_n = tile_of(tl.program_id(0), num_tiles, tl.cdiv(N, BN), GROUP)
    expert, before = _owner(offsets, tile, E, E_PADDED, BM)
    if expert < E:
        row = tl.load(offsets + expert) + (tile - before).to(tl.int64) * BM
        end = tl.load(offsets + expert + 1)
        column = tile_n.to(tl.int64) * BN
        is_row = row + tl.arange(0, BM) < end
        is_column = column + tl.arange(0, BN) < N
        if DESCRIPTORS:
            acc = accumulators_by_descriptor(
                x, w, row.to(tl.int32), expert * N + tile_n * BN, K, BM, BN, BK, SWAPPED
            )
        else:
            acc = accumulators(
                x + row * x_stride,
                w + expert.to(tl.int64) * expert_stride + column * w_stride,
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
        store_tile(y + row * N + column, acc, is_row, is_column, N, BM, BN, SWAPPED)


def tile_for(rows: int, experts: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` over `experts`: what fits their mean number of rows
    (measured on an H200: benchmarks/results/kernels-matmul.json)."""
    mean = rows / experts
    if dtype == torch.float32:
        return Tile(16, 64, 32, 4, 2, True) if mean <= 16 else Tile(64, 64, 32, 4, 2)
    if mean <= 1.5:
        return Tile(16, 64, 128, 4, 4, True)
    if mean <= 6:
        return Tile(32, 64, 128, 4, 3, True, True)
    if mean <= 96:
        return Tile(64, 128, 64, 4, 4, False, True)
    if mean <= 160:
        return Tile(128, 128, 64, 4, 4, False, True)
    return Tile(128, 256, 64, 8, 3, False, True)


def grouped_gemm(
    x_MK: Tensor,
    weight_EFK: Tensor,
    offsets_E1: Tensor,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    (m, k), (experts, f) = x_MK.shape, weight_EFK.shape[:2]
    if 0 in (m, k, f):
        return x_MK.new_zeros(m, f, dtype=out_dtype)
    x_MK, weight_EFK = rows_contiguous(x_MK), rows_contiguous(weight_EFK)
    y_MF = x_MK.new_empty(m, f, dtype=out_dtype)
    tile = fitted(tile or tile_for(m, experts, x_MK.dtype), x_MK.dtype, x_MK.device)
    # A run of c rows has at most (c - 1) // rows + 1 tiles, and no tile is empty.
    num_tiles = min(m, m // tile.rows + experts)
    grid = (num_tiles * triton.cdiv(f, tile.columns),)
    by_descriptor = (
        tile.descriptors
        and weight_EFK.is_contiguous()
        and may_describe(x_MK)
        and may_describe(weight_EFK)
    )
    x, w = x_MK, weight_EFK
    if by_descriptor:
        x = described(x_MK, tile.rows, tile.depth)
        w = described(weight_EFK.flatten(0, 1), tile.columns, tile.depth)
    _grouped_gemm[grid](
        x,
        w,
        y_MF,
        offsets_E1,
        num_tiles,
        f,
        x_MK.stride(0),
        weight_EFK.stride(0),
        weight_EFK.stride(1),
        E=experts,
        E_PADDED=triton.next_power_of_2(experts),
        K=k,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SWAPPED=tile.swapped,
        DESCRIPTORS=by_descriptor,
        GROUP=1 if tile.swapped else 8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y_MF


@triton.jit(do_not_specialize=["num_tiles"])
def _of_inputs(
    grad,
    w,
    out,
    offsets,
    num_tiles,
    N,
    grad_stride,
    expert_stride,
    w_stride,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of grad [M, F] @ w[e] [F, N], F in order."""
    tile, tile_n = tile_of(tl.program_id(0), num_tiles, tl.cdiv(N, BN), GROUP)
    expert, before = _owner(offsets, tile, E, E_PADDED, BM)
    if expert < E:
        row = tl.load(offsets + expert) + (tile - before).to(tl.int64) * BM + tl.arange(0, BM)
        is_row = row < tl.load(offsets + expert + 1)
        column = tile_n * BN + tl.arange(0, BN)
        is_column = column < N
        in_f = tl.arange(0, BK)
        grad_at = grad + row[:, None] * grad_stride + in_f[None, :]
        w_at = w + expert.to(tl.int64) * expert_stride
        w_at += in_f[:, None].to(tl.int64) * w_stride + column[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for f in range(0, F, BK):
            grad_tile = tl.load(grad_at, mask=is_row[:, None] & (in_f < F - f)[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=(in_f < F - f)[:, None] & is_column[None, :], other=0.0)
            acc = tl.dot(grad_tile, w_tile, acc, input_precision="ieee")
            grad_at += BK
            w_at += BK * w_stride
        at = out + row[:, None] * N + column[None, :]
        tl.store(at, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _of_weights(
    grad,
    x,
    out,
    offsets,
    F,
    K,
    grad_stride,
    x_stride,
    BF: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
):
    """A tile of grad[rows of e]^T @ x[rows of e], rows in order; zeros for an expert without."""
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    tiles_k = tl.cdiv(K, BK)
    f = (tl.program_id(0) // tiles_k) * BF + tl.arange(0, BF)
    k = (tl.program_id(0) % tiles_k) * BK + tl.arange(0, BK)
    is_f, is_k = f < F, k < K
    acc = tl.zeros((BF, BK), dtype=tl.float32)
    for first in range(begin, end, BM):
        row = first + tl.arange(0, BM)
        is_row = row < end
        grad_at = grad + row[:, None] * grad_stride + f[None, :]
        x_at = x + row[:, None] * x_stride + k[None, :]
        grad_tile = tl.load(grad_at, mask=is_row[:, None] & is_f[None, :], other=0.0)
        x_tile = tl.load(x_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
        acc = tl.dot(tl.trans(grad_tile), x_tile, acc, input_precision="ieee")
    at = out + (expert * F + f[:, None]) * K + k[None, :]
    tl.store(at, acc, mask=is_f[:, None] & is_k[None, :])


def backward_tile(dtype: torch.dtype, rows: float) -> Tile:
    """Of both products; columns and depth of `of_weights` are those of its output and its rows."""
    if dtype == torch.float32:
        return Tile(32, 64, 32, 4, 2)
    return Tile(64, 128, 64, 4, 3) if rows <= 96 else Tile(128, 128, 64, 8, 3)


def of_inputs(
    grad_MF: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, tile: Tile | None = None
) -> Tensor:
    """grad[m] @ weight[e] for the rows m of expert e, operands of one dtype: [M, K] fp32."""
    (m, f), (experts, _, k) = grad_MF.shape, weight_EFK.shape
    if 0 in (m, f, k):
        return grad_MF.new_zeros(m, k, dtype=torch.float32)
    grad_MF, weight_EFK = rows_contiguous(grad_MF), rows_contiguous(weight_EFK)
    out_MK = grad_MF.new_empty(m, k, dtype=torch.float32)
    tile = tile or backward_tile(grad_MF.dtype, m / experts)
    num_tiles = min(m, m // tile.rows + experts)
    _of_inputs[(num_tiles * triton.cdiv(k, tile.columns),)](
        grad_MF,
        weight_EFK,
        out_MK,
        offsets_E1,
        num_tiles,
        k,
        grad_MF.stride(0),
        weight_EFK.stride(0),
        weight_EFK.stride(1),
        E=experts,
        E_PADDED=triton.next_power_of_2(experts),
        F=f,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_MK


def of_weights(
    grad_MF: Tensor, x_MK: Tensor, offsets_E1: Tensor, tile: Tile | None = None
) -> Tensor:
    """grad^T @ x over the rows of each expert, operands of one dtype: [E, F, K] fp32."""
    (m, f), k, experts = grad_MF.shape, x_MK.shape[1], offsets_E1.shape[0] - 1
    if 0 in (m, f, k, experts):
        return grad_MF.new_zeros(experts, f, k, dtype=torch.float32)
    grad_MF, x_MK = rows_contiguous(grad_MF), rows_contiguous(x_MK)
    out_EFK = grad_MF.new_empty(experts, f, k, dtype=torch.float32)
    tile = tile or backward_tile(grad_MF.dtype, m / experts)
    _of_weights[(triton.cdiv(f, tile.rows) * triton.cdiv(k, tile.columns), experts)](
        grad_MF,
        x_MK,
        out_EFK,
        offsets_E1,
        f,
        k,
        grad_MF.stride(0),
        x_MK.stride(0),
        BF=tile.rows,
        BK=tile.columns,
        BM=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_EFK
