"""The whole prologue in one launch: a program has some heads of a few rows, either of keys and
values, of queries, or of the relative-bias branch.

Of a sequence's ring only those programs know that have its first row: they have all rows that see
the ring, and write it after them (as in residual_norm).
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.short_conv.kernel_rows import (
    convolved_row,
    is_packed,
    remember_begun,
    rows_behind,
)
from suzuri.kernels.triton_math import tree_sum

COVERED = (torch.bfloat16, torch.float32)
ELEMENTS = 1024
"""Channels of the heads of one program together, twice as many where it has several rows
(benchmarks/results/seams-h200.json)."""
MANY, ROWS = 512, 4
"""Rows from which a program has more than one, and how many."""


@triton.jit
def _normed(x, weight, eps, place, weight_stride, CHANNELS: tl.constexpr):
    """Heads x [R, C] in fp32 normed, not rounded: as rms_norm's kernel."""
    scale = tl.rsqrt(tl.div_rn(tree_sum(x * x), CHANNELS * 1.0) + eps)
    factor = tl.load(weight + place * weight_stride, mask=place < CHANNELS, other=0.0)
    return x * scale[:, None] * factor.to(tl.float32)[None, :]


@triton.jit
def _tau(positions, row, offset, n_floor, alpha):
    """The factor of a row: as log_scaling's kernel."""
    ratio = tl.div_rn((tl.load(positions + row) + offset + 1).to(tl.float32), n_floor)
    return 1 + alpha * tl.log(tl.maximum(ratio, 1.0))


@triton.jit
def _columns(
    group,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Columns [R, C] of a group of heads among WIDTH; what is no channel is behind them."""
    head, place = group * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    column = head[:, None] * CHANNELS + place[None, :]
    if BLOCK != CHANNELS:
        column = tl.where((place < CHANNELS)[None, :], column, WIDTH)
    return column


@triton.jit
def _queries(
    x,
    norm,
    positions,
    out,
    eps,
    offset,
    n_floor,
    alpha,
    row,
    num_rows,
    group,
    x_row,
    norm_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    column = _columns(group, HEADS, CHANNELS, BLOCK, WIDTH)
    inside = column < tl.where(row < num_rows, WIDTH, 0)
    row = tl.minimum(row, num_rows - 1)
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, column.shape[1])
    y = _normed(value, norm, eps, place, norm_stride, CHANNELS).to(out.dtype.element_ty)
    if IS_SCALED:
        factor = _tau(positions, row, offset, n_floor, alpha)
        y = (y.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, y, mask=inside)


@triton.jit
def _branch(
    x,
    positions,
    out,
    offset,
    n_floor,
    alpha,
    row,
    num_rows,
    group,
    x_row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < tl.where(row < num_rows, WIDTH, 0)
    row = tl.minimum(row, num_rows - 1)
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    y = value * _tau(positions, row, offset, n_floor, alpha)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keys_values(
    x,
    weight,
    norm,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    keys,
    values,
    places,
    eps,
    row,
    first,
    num_rows,
    group,
    x_row,
    weight_channel,
    weight_tap,
    norm_stride,
    state_slot,
    state_row,
    state_channel,
    page_size,
    page_stride,
    offset_stride,
    head_stride,
    channel_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    IS_SINGLE: tl.constexpr,
):
    """One row. Nothing is written if it sees a ring that the program before has. IS_SINGLE: it is
    alone in its sequence, and writes the ring too."""
    column = _columns(group, HEADS, CHANNELS, BLOCK, WIDTH)
    is_row = row < num_rows
    is_written = is_row
    row = tl.minimum(row, num_rows - 1)
    own = tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0)
    sequence = row
    start = row
    if not IS_SINGLE:
        sequence = tl.load(seq_ids + row)
        start = tl.load(seq_starts + sequence)
    index = row - start
    position = index
    slot = index
    place = row
    if HAS_STATE:
        place = tl.load(places + row)
        is_written = is_written & (place >= 0)
    if RING > 0:
        position = tl.load(positions + row)
        slot = tl.load(slots + sequence)
        is_written = is_written & ((start >= first) | (index >= TAPS - 1))
    total = convolved_row(
        x,
        weight,
        state,
        row,
        index,
        position,
        slot,
        own,
        column,
        x_row,
        weight_channel,
        weight_tap,
        state_slot,
        state_row,
        state_channel,
        WIDTH,
        TAPS,
        RING,
        PACKED,
        IS_SINGLE,
    ).to(own.dtype)
    channel = tl.arange(0, column.shape[1])
    key = _normed(total.to(tl.float32), norm, eps, channel, norm_stride, CHANNELS).to(own.dtype)
    # A tile may hold keys and values.
    half: tl.constexpr = WIDTH // 2
    begin = (place // page_size) * page_stride + (place % page_size) * offset_stride
    head = group * HEADS + tl.arange(0, HEADS)
    key_at = head[:, None] * head_stride + channel[None, :] * channel_stride
    value_at = key_at - (half // CHANNELS) * head_stride
    tl.store(keys + begin + key_at, key, mask=column < tl.where(is_written, half, 0))
    is_value = (column >= half) & (column < tl.where(is_written, WIDTH, 0))
    tl.store(values + begin + value_at, total, mask=is_value)
    if IS_SINGLE:
        # Everything is read before anything is overwritten.
        tl.debug_barrier()
        kept_at = state + slot * state_slot + (position % RING) * state_row
        is_kept = column < tl.where(is_row & (slot >= 0), WIDTH, 0)
        tl.store(kept_at + column * state_channel, own, mask=is_kept)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x,
    weight,
    q_norm,
    k_norm,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    keys,
    values,
    places,
    queries,
    branch,
    eps,
    offset,
    n_floor,
    alpha,
    num_rows,
    x_row,
    weight_channel,
    weight_tap,
    q_norm_stride,
    k_norm_stride,
    state_slot,
    state_row,
    state_channel,
    page_size,
    page_stride,
    offset_stride,
    head_stride,
    channel_stride,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    R_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    IS_SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    IS_SINGLE: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    group = tl.program_id(1)
    if group < KV_GROUPS:
        more = 0
        if RING > 0 and TAPS > 2 and not IS_SINGLE:
            more = rows_behind(seq_ids, seq_starts, first, num_rows, TILE, TAPS)
            more = tl.maximum(more, 0)
        for i in range(TILE + more):
            _keys_values(
                x + Q_WIDTH,
                weight,
                k_norm,
                positions,
                seq_ids,
                seq_starts,
                state,
                slots,
                keys,
                values,
                places,
                eps,
                first + i,
                first,
                num_rows,
                group,
                x_row,
                weight_channel,
                weight_tap,
                k_norm_stride,
                state_slot,
                state_row,
                state_channel,
                page_size,
                page_stride,
                offset_stride,
                head_stride,
                channel_stride,
                KV_WIDTH,
                CHANNELS,
                BLOCK,
                HEADS,
                TAPS,
                RING,
                HAS_STATE,
                PACKED,
                IS_SINGLE,
            )
        if RING > 0 and not IS_SINGLE:
            # Everything is read before anything is overwritten.
            tl.debug_barrier()
            remember_begun(
                x + Q_WIDTH,
                positions,
                seq_ids,
                seq_starts,
                state,
                slots,
                first,
                num_rows,
                _columns(group, HEADS, CHANNELS, BLOCK, KV_WIDTH),
                x_row,
                state_slot,
                state_row,
                state_channel,
                KV_WIDTH,
                RING,
                TILE,
            )
    elif group < KV_GROUPS + Q_GROUPS:
        for i in range(TILE):
            _queries(
                x,
                q_norm,
                positions,
                queries,
                eps,
                offset,
                n_floor,
                alpha,
                first + i,
                num_rows,
                group - KV_GROUPS,
                x_row,
                q_norm_stride,
                Q_WIDTH,
                CHANNELS,
                BLOCK,
                HEADS,
                IS_SCALED,
            )
    else:
        for i in range(TILE):
            _branch(
                x + (Q_WIDTH + KV_WIDTH),
                positions,
                branch,
                offset,
                n_floor,
                alpha,
                first + i,
                num_rows,
                group - (KV_GROUPS + Q_GROUPS),
                x_row,
                R_WIDTH,
                COLUMNS,
            )


def covers(
    qkvr_NX: Tensor, conv_CK: Tensor, q_norm_C: Tensor, k_norm_C: Tensor, state: Any
) -> bool:
    """Whether the kernel has these dtypes, widths and pages."""
    numbers = [qkvr_NX, conv_CK, q_norm_C, k_norm_C]
    if state is not None:
        numbers += [state.conv_LRC, state.k_pages_PTUC, state.v_pages_PTUC]
        if state.k_pages_PTUC.stride() != state.v_pages_PTUC.stride():
            return False
    same = {x.dtype for x in numbers}
    is_covered = len(same) == 1 and same <= set(COVERED)
    return is_covered and conv_CK.shape[1] > 0 and q_norm_C.shape[0] <= exact.FOLD


def attention_prologue(
    qkvr_NX: Tensor,
    conv_CK: Tensor,
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    sequences: Sequence[Tensor],
    heads: int,
    kv_heads: int,
    eps: float,
    scaling: tuple[float, float, int] | None,
    state: Any,
    *,
    single_rows: bool = False,
    elements: int | None = None,
    rows: int | None = None,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    num_rows, channels, taps = qkvr_NX.shape[0], q_norm_C.shape[0], conv_CK.shape[1]
    x = qkvr_NX if qkvr_NX.stride(1) == 1 else qkvr_NX.contiguous()
    q_width, kv_width = heads * channels, 2 * kv_heads * channels
    r_width = x.shape[1] - q_width - kv_width
    q_NHC = x.new_empty((num_rows, heads, channels))
    r_NHB = x[:, q_width + kv_width :].unflatten(1, (heads, -1))
    branch = r_NHB if scaling is None else x.new_empty(r_NHB.shape)
    k_pages = v_pages = k_NUC = v_NUC = None
    if state is None:
        k_NUC, v_NUC = (x.new_empty((num_rows, kv_heads, channels)) for _ in range(2))
        k_pages, v_pages = k_NUC[:, None], v_NUC[:, None]
    else:
        k_pages, v_pages = state.k_pages_PTUC, state.v_pages_PTUC
    if not num_rows:
        return q_NHC, branch, k_NUC, v_NUC
    positions_N, seq_ids_N, seq_starts_S1 = (tensor.contiguous() for tensor in sequences)
    ring = 0 if state is None else state.conv_LRC.shape[1]
    block = triton.next_power_of_2(channels)
    elements = elements or (ELEMENTS if num_rows < MANY else 2 * ELEMENTS)
    heads_each = max(1, elements // block)
    heads_each = min(heads_each, triton.next_power_of_2(max(heads, 2 * kv_heads)))
    columns = min(elements, triton.next_power_of_2(r_width))
    q_groups, kv_groups = (triton.cdiv(n, heads_each) for n in (heads, 2 * kv_heads))
    r_groups = 0 if scaling is None else triton.cdiv(r_width, columns)
    tile = rows or (1 if num_rows < MANY else ROWS)
    n_floor, alpha, offset = scaling or (1.0, 0.0, 0)
    # Without state, any tensors stand in for its arguments: they are not looked at.
    _kernel[(triton.cdiv(num_rows, tile), kv_groups + q_groups + r_groups)](
        x,
        conv_CK,
        q_norm_C,
        k_norm_C,
        positions_N,
        seq_ids_N,
        seq_starts_S1,
        state.conv_LRC if ring else x,
        state.conv_slots_S.contiguous() if ring else seq_ids_N,
        k_pages,
        v_pages,
        seq_ids_N if state is None else state.page_slots_N.contiguous(),
        q_NHC,
        branch,
        float(eps),
        offset,
        float(n_floor),
        float(alpha),
        num_rows,
        x.stride(0),
        *conv_CK.stride(),
        q_norm_C.stride(0),
        k_norm_C.stride(0),
        *(state.conv_LRC.stride() if ring else (0, 0, 0)),
        k_pages.shape[1],
        *k_pages.stride(),
        Q_WIDTH=q_width,
        KV_WIDTH=kv_width,
        R_WIDTH=r_width,
        CHANNELS=channels,
        BLOCK=block,
        HEADS=heads_each,
        COLUMNS=columns,
        Q_GROUPS=q_groups,
        KV_GROUPS=kv_groups,
        TAPS=taps,
        RING=ring,
        TILE=tile,
        HAS_STATE=state is not None,
        IS_SCALED=scaling is not None,
        PACKED=is_packed(conv_CK),
        IS_SINGLE=single_rows and ring > 0,
        num_warps=num_warps,
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return q_NHC, branch, k_NUC, v_NUC
