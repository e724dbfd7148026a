"""All experts' products in one launch: every program finds its expert from the offsets on the GPU.

The inner loop is that of matmul, so a row has the bits of a plain product with its expert's weight.
The grid covers the most row tiles there can be for M rows and E experts; the rest return at once.
Rows behind the last expert's become zeros. With SWIGLU the accumulators of gate and up, neighbours
in a row, become a hidden unit before they leave the registers. It multiplies and divides by the
functions of triton_math, and no product of theirs meets a sum, so that nothing can be contracted:
the bits are those of the op swiglu. (Without contraction the fp32 product itself would change.)
`of_inputs` and `of_weights` are the two products of the backward, each tile with one owner.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.grouped_gemm.tiles import Schedule, schedule_for
from suzuri.kernels.matmul.kernel import (
    Tile,
    accumulators,
    accumulators_by_descriptor,
    described,
    fitted,
    may_describe,
    num_multiprocessors,
    rows_contiguous,
    store_tile,
    tile_of,
)
from suzuri.kernels.triton_math import silu


@triton.jit
def _tiles(offsets, experts, E: tl.constexpr, BM: tl.constexpr):
    """Tiles of BM rows of each of the experts, int64."""
    begin_E = tl.load(offsets + experts, mask=experts < E, other=0)
    end_E = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    return (end_E - begin_E + (BM - 1)) // BM


@triton.jit
def _owner(offsets, tile, E: tl.constexpr, E_PADDED: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile of BM rows (E for one too many), and the number of tiles before its."""
    experts = tl.arange(0, E_PADDED)
    tiles_E = _tiles(offsets, experts, E, BM).to(tl.int32)
    before_E = tl.cumsum(tiles_E, axis=0)
    expert = tl.sum((before_E <= tile).to(tl.int32), axis=0)
    return tl.minimum(expert, E), tl.sum(tl.where(experts < expert, tiles_E, 0), axis=0)


@triton.jit
def _place(
    offsets,
    program,
    M,
    num_n,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(expert, first row, row behind its last, column tile) of a program. The programs of an expert
    are neighbours; expert E has the rows behind the last one's."""
    tile = program // num_n
    expert, before = _owner(offsets, tile, E, E_PADDED, BM)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1, mask=expert < E, other=0)
    end = tl.where(expert < E, end, M.to(tl.int64))
    tiles = ((end - begin + (BM - 1)) // BM).to(tl.int32)
    tiles = tl.maximum(tiles, tile - before + 1)  # of a program too many
    tile_m, tile_n = tile_of(program - before * num_n, tiles, num_n, GROUP)
    return expert, begin + tile_m.to(tl.int64) * BM, end, tile_n


@triton.jit
def _spread(
    offsets, program, num_n, E: tl.constexpr, E_PADDED: tl.constexpr, BM: tl.constexpr, LAST
):
    """The program whose tile this one takes, so that those of the LAST experts, which have all
    tokens, lie evenly among the others': they multiply while the others wait for weights."""
    experts = tl.arange(0, E_PADDED)
    programs_E = _tiles(offsets, experts, E, BM) * num_n
    total = tl.sum(programs_E, axis=0)
    last = tl.sum(tl.where(experts >= E - LAST, programs_E, 0), axis=0)
    before = program * last // tl.maximum(total, 1)  # of the LAST experts' programs
    is_last = (program + 1) * last // tl.maximum(total, 1) > before
    found = tl.where(is_last, total - last + before, program - before)
    return tl.where(program < total, found, program).to(tl.int32)


@triton.jit
def _gathered(
    x,
    w,
    order,
    is_row,
    is_column,
    x_stride,
    w_stride,
    w_row,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """`accumulators` of the rows order // SLOTS of x, which are not neighbours."""
    in_k = tl.arange(0, BK)
    slot = tl.load(order + tl.arange(0, BM), mask=is_row, other=0)
    x_at = x + (slot // SLOTS)[:, None] * x_stride + in_k[None, :]
    if not DESCRIPTORS:
        w_at = w + tl.arange(0, BN)[:, None] * w_stride + in_k[None, :]
    if SWAPPED:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            x_tile = tl.load(x_at, mask=is_row[:, None], other=0.0)
        else:
            x_tile = tl.load(x_at, mask=is_row[:, None] & (in_k[None, :] < K - k), other=0.0)
        if DESCRIPTORS:
            w_tile = w.load([w_row, k])
        elif K % BK == 0:
            w_tile = tl.load(w_at, mask=is_column[:, None], other=0.0)
            w_at += BK
        else:
            w_tile = tl.load(w_at, mask=is_column[:, None] & (in_k[None, :] < K - k), other=0.0)
            w_at += BK
        if SWAPPED:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
        x_at += BK
    return acc


@triton.jit
def _hidden(acc, BM: tl.constexpr, BN: tl.constexpr, SWAPPED: tl.constexpr):
    """silu(gate) * up of neighbouring columns (rows if SWAPPED): half as many."""
    if SWAPPED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 2, 2, BM)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    return silu(gate) * up


@triton.jit
def _store(
    y,
    acc,
    row,
    end,
    tile_n,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SWAPPED: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    is_row = row + tl.arange(0, BM) < end
    if SWIGLU:
        width, first = N // 2, tile_n.to(tl.int64) * (BN // 2)
        is_column = first + tl.arange(0, BN // 2) < width
        hidden = _hidden(acc, BM, BN, SWAPPED)
        at = y + row * width + first
        store_tile(at, hidden, is_row, is_column, width, BM, BN // 2, SWAPPED)
    else:
        column = tile_n.to(tl.int64) * BN
        is_column = column + tl.arange(0, BN) < N
        store_tile(y + row * N + column, acc, is_row, is_column, N, BM, BN, SWAPPED)


@triton.jit(do_not_specialize=["M"])
def _grouped_gemm(
    x,
    x_half,
    w,
    y,
    offsets,
    order,
    M,
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
    SLOTS: tl.constexpr,
    HALVES: tl.constexpr,
    LAST: tl.constexpr,
    SWIGLU: tl.constexpr,
    GROUP: tl.constexpr,
):
    """With HALVES an expert's last tile is one of BM / 2 rows (x_half's) where it has no more."""
    program = tl.program_id(0)
    if LAST:
        program = _spread(offsets, program, tl.cdiv(N, BN), E, E_PADDED, BM, LAST)
    expert, row, end, tile_n = _place(offsets, program, M, tl.cdiv(N, BN), E, E_PADDED, BM, GROUP)
    if expert < E:
        column = tile_n.to(tl.int64) * BN
        is_row = row + tl.arange(0, BM) < end
        is_column = column + tl.arange(0, BN) < N
        w_row = expert * N + tile_n * BN
        if DESCRIPTORS:
            w_at = w
        else:
            w_at = w + expert.to(tl.int64) * expert_stride + column * w_stride
        if SLOTS:
            acc = _gathered(
                x,
                w_at,
                order + row,
                is_row,
                is_column,
                x_stride,
                w_stride,
                w_row,
                K,
                BM,
                BN,
                BK,
                SWAPPED,
                DESCRIPTORS,
                SLOTS,
            )
        elif DESCRIPTORS:
            if HALVES:  # noqa: SIM102 (known when it is compiled; the other is not)
                if end - row <= BM // 2:
                    acc = accumulators_by_descriptor(
                        x_half, w, row.to(tl.int32), w_row, K, BM // 2, BN, BK, SWAPPED
                    )
                    _store(y, acc, row, end, tile_n, N, BM // 2, BN, SWAPPED, SWIGLU)
                    return
            acc = accumulators_by_descriptor(x, w, row.to(tl.int32), w_row, K, BM, BN, BK, SWAPPED)
        else:
            acc = accumulators(
                x + row * x_stride,
                w_at,
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
        _store(y, acc, row, end, tile_n, N, BM, BN, SWAPPED, SWIGLU)
    elif row < end:
        if SWAPPED:
            nothing = tl.zeros((BN, BM), dtype=tl.float32)
        else:
            nothing = tl.zeros((BM, BN), dtype=tl.float32)
        _store(y, nothing, row, end, tile_n, N, BM, BN, SWAPPED, SWIGLU)


@triton.jit(do_not_specialize=["M", "num_programs"])
def _persistent(
    x,
    w,
    y,
    offsets,
    M,
    N,
    num_programs,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWIGLU: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `_grouped_gemm` by descriptors, a program per multiprocessor walking over the tiles: the
    next one's loads begin before this one is written."""
    num_n = tl.cdiv(N, BN)
    tiles_E = _tiles(offsets, tl.arange(0, E_PADDED), E, BM).to(tl.int32)
    num_tiles = tl.sum(tiles_E, axis=0)
    left = M - tl.load(offsets + E).to(tl.int32)
    num_tiles += (left + BM - 1) // BM
    for program in tl.range(tl.program_id(0), num_tiles * num_n, num_programs, flatten=True):
        expert, row, end, tile_n = _place(offsets, program, M, num_n, E, E_PADDED, BM, GROUP)
        x_row = row.to(tl.int32)
        w_row = tl.minimum(expert, E - 1) * N + tile_n * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            x_tile = x.load([x_row, k])
            w_tile = w.load([w_row, k])
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
        acc = tl.where(expert < E, acc, 0.0)
        _store(y, acc, row, end, tile_n, N, BM, BN, False, SWIGLU)


def grouped_gemm(
    x_MK: Tensor,
    weight_EFK: Tensor,
    offsets_E1: Tensor,
    out_dtype: torch.dtype,
    tile: Tile | Schedule | None = None,
    *,
    swiglu: bool = False,
    order_M: Tensor | None = None,
    num_slots: int = 1,
    num_shared: int = 0,
) -> Tensor:
    k, (experts, f) = x_MK.shape[1], weight_EFK.shape[:2]
    m = x_MK.shape[0] if order_M is None else order_M.shape[0]
    width = f // 2 if swiglu else f
    if 0 in (m, k, f):
        return x_MK.new_zeros(m, width, dtype=out_dtype)
    x_MK, weight_EFK = rows_contiguous(x_MK), rows_contiguous(weight_EFK)
    y_MF = x_MK.new_empty(m, width, dtype=out_dtype)
    if tile is None:
        kind = ("gate_up" if order_M is None else "gathered") if swiglu else "down"
        tile = schedule_for(m, experts, k, x_MK.dtype, kind)
    plan = tile if isinstance(tile, Schedule) else Schedule(tile, 1 if tile.swapped else 8)
    tile = fitted(plan.tile, x_MK.dtype, x_MK.device)
    describes_w = tile.descriptors and weight_EFK.is_contiguous() and may_describe(weight_EFK)
    if order_M is None:
        describes_w = describes_w and may_describe(x_MK)
    w = described(weight_EFK.flatten(0, 1), tile.columns, tile.depth) if describes_w else weight_EFK
    x = described(x_MK, tile.rows, tile.depth) if describes_w and order_M is None else x_MK
    # A run of c rows has at most (c - 1) // rows + 1 tiles, and no tile is empty.
    programs = min(m, m // tile.rows + experts + 1) * triton.cdiv(f, tile.columns)
    shape: dict[str, Any] = {
        "E": experts,
        "E_PADDED": triton.next_power_of_2(experts),
        "K": k,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "SWIGLU": swiglu,
        "GROUP": plan.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if plan.persistent and describes_w and order_M is None and not tile.swapped:
        programs = min(programs, num_multiprocessors(x_MK.device))
        _persistent[(programs,)](x, w, y_MF, offsets_E1, m, f, programs, **shape)
        return y_MF
    halves = plan.halved and describes_w and order_M is None and not tile.swapped
    _grouped_gemm[(programs,)](
        x,
        described(x_MK, tile.rows // 2, tile.depth) if halves else x,
        w,
        y_MF,
        offsets_E1,
        offsets_E1 if order_M is None else order_M,
        m,
        f,
        x_MK.stride(0),
        weight_EFK.stride(0),
        weight_EFK.stride(1),
        SWAPPED=tile.swapped,
        DESCRIPTORS=describes_w,
        SLOTS=0 if order_M is None else num_slots,
        HALVES=halves,
        LAST=num_shared if plan.spread else 0,
        **shape,
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
