"""All experts' products in one launch: every program finds its expert from the offsets on the GPU.

The inner loop is that of matmul, so a row has the bits of a plain product with its expert's weight.
The grid covers the most row tiles there can be for M rows and E experts; the rest return at once.
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
    experts = tl.arange(0, E_PADDED)
    begin_E = tl.load(offsets + experts, mask=experts < E, other=0)
    end_E = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles_E = ((end_E - begin_E + (BM - 1)) // BM).to(tl.int32)
    before_E = tl.cumsum(tiles_E, axis=0)
    expert = tl.sum((before_E <= tile).to(tl.int32), axis=0)
    if expert < E:
        first = tl.sum(tl.where(experts < expert, tiles_E, 0), axis=0)
        row = tl.load(offsets + expert) + (tile - first).to(tl.int64) * BM
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
