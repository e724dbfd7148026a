"""Convolution, residual and norm in one launch: a program walks a few whole rows.

New inputs overwrite ring rows that the first rows of the same sequence may still need. So whoever
has the first row of a sequence also has all that see the ring, and writes the ring after them.

The sum of squares is that of rms_norm's kernel: chunks of exact.FOLD columns, each a tree.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.triton_math import tree_sum

COVERED = (torch.bfloat16, torch.float32)
MOST = 2 * exact.FOLD
"""Columns of the widest row: a program holds two chunks."""
MANY, ROWS = 1024, 4
"""Rows from which a program walks more than one, and how many: it reads an input once, not once
for every tap."""


@triton.jit
def _packed_taps(weight, column, inside, PACKED: tl.constexpr):
    """The four bf16 taps of each channel as one integer, oldest lowest; nothing if not PACKED."""
    if PACKED:
        taps = tl.load(weight.to(tl.pointer_type(tl.int64)) + column, mask=inside, other=0)
    else:
        taps = column
    return taps


@triton.jit
def mixed(
    y,
    h,
    weight,
    state,
    row,
    index,
    position,
    slot,
    own,
    column,
    y_row,
    h_row,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The stream's new row [C] in fp32, rounded to its dtype: as short_conv's `_convolved` and a
    sum. `row`, `index` (in its sequence), `position` and `slot` are numbers; `own` [C] is the
    convolution's input of this row."""
    inside = column < WIDTH
    stream = tl.load(h + row * h_row + column, mask=inside, other=0.0)
    packed = _packed_taps(weight, column, inside, PACKED)
    for step in tl.static_range(TAPS):
        back = TAPS - 1 - step
        if PACKED:
            tap = (((packed >> (16 * step)) & 0xFFFF).to(tl.int32) << 16).to(
                tl.float32, bitcast=True
            )
        else:
            tap_at = weight + column * weight_channel + step * weight_tap
            tap = tl.load(tap_at, mask=inside, other=0.0).to(tl.float32)
        if back == 0:
            value = own.to(tl.float32)
        else:
            in_batch = column < tl.where(index >= back, WIDTH, 0)
            value = tl.load(y + (row - back) * y_row + column, mask=in_batch, other=0.0)
            if RING > 0:
                is_seen = (index < back) & (position >= back) & (slot >= 0)
                in_ring = column < tl.where(is_seen, WIDTH, 0)
                kept_at = state + slot * state_slot + ((position - back) % RING) * state_row
                kept = tl.load(kept_at + column * state_channel, mask=in_ring, other=0.0)
                value = tl.where(in_ring, kept, value)
            value = value.to(tl.float32)
        if step == 0:
            total = tap * value
        else:
            total = total + tap * value
    total = (total + own.to(tl.float32)).to(own.dtype).to(tl.float32)
    return (stream.to(tl.float32) + total).to(stream.dtype).to(tl.float32)


@triton.jit
def squares(value):
    """The tree sum of squares of value [C]: [1]."""
    return tree_sum(tl.reshape(value * value, (1, value.shape[0])))


@triton.jit
def put_normed(value, scale, weight, out, row, end, column, weight_stride, WIDTH: tl.constexpr):
    """Writes the columns before `end` of a row [C]: all, or none."""
    inside = column < end
    factor = tl.load(weight + column * weight_stride, mask=inside, other=0.0).to(tl.float32)
    y = value * scale * factor
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row(
    y,
    h,
    weight,
    norm,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    stream,
    out,
    eps,
    row,
    first,
    num_rows,
    y_row,
    h_row,
    weight_channel,
    weight_tap,
    norm_stride,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One row. Nothing is written if it sees a ring that the program before has: `first` is this
    program's first row."""
    is_row = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    sequence = tl.load(seq_ids + row)
    column = tl.arange(0, FIRST)
    own = tl.load(y + row * y_row + column, mask=column < WIDTH, other=0.0)
    start = tl.load(seq_starts + sequence)
    index = row - start
    position = index
    slot = index
    is_written = is_row
    if RING > 0:
        position = tl.load(positions + row)
        slot = tl.load(slots + sequence)
        is_written = is_row & ((start >= first) | (index >= TAPS - 1))
    end = tl.where(is_written, WIDTH, 0)
    value = mixed(
        y,
        h,
        weight,
        state,
        row,
        index,
        position,
        slot,
        own,
        column,
        y_row,
        h_row,
        weight_channel,
        weight_tap,
        state_slot,
        state_row,
        state_channel,
        WIDTH,
        TAPS,
        RING,
        PACKED,
    )
    total = squares(value)
    at = stream + row * WIDTH
    tl.store(at + column, value.to(stream.dtype.element_ty), mask=column < end)
    if SECOND > 0:
        later = FIRST + tl.arange(0, SECOND)
        second_own = tl.load(y + row * y_row + later, mask=later < WIDTH, other=0.0)
        second = mixed(
            y,
            h,
            weight,
            state,
            row,
            index,
            position,
            slot,
            second_own,
            later,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            WIDTH,
            TAPS,
            RING,
            PACKED,
        )
        total = total + squares(second)
        tl.store(at + later, second.to(stream.dtype.element_ty), mask=later < end)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    put_normed(value, scale, norm, out, row, end, column, norm_stride, WIDTH)
    if SECOND > 0:
        put_normed(second, scale, norm, out, row, end, later, norm_stride, WIDTH)


@triton.jit
def _remember(
    y,
    state,
    positions,
    source,
    slot,
    column,
    y_row,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
):
    """Writes one input to its place in the ring."""
    inside = column < WIDTH
    value = tl.load(y + source * y_row + column, mask=inside)
    at = state + slot * state_slot + (tl.load(positions + source) % RING) * state_row
    tl.store(at + column * state_channel, value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    y,
    h,
    weight,
    norm,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    stream,
    out,
    eps,
    num_rows,
    y_row,
    h_row,
    weight_channel,
    weight_tap,
    norm_stride,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    for i in range(TILE):
        _row(
            y,
            h,
            weight,
            norm,
            positions,
            seq_ids,
            seq_starts,
            state,
            slots,
            stream,
            out,
            eps,
            first + i,
            first,
            num_rows,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            norm_stride,
            state_slot,
            state_row,
            state_channel,
            WIDTH,
            FIRST,
            SECOND,
            TAPS,
            RING,
            PACKED,
        )
    if RING > 0 and TAPS > 2:
        # Rows behind the tile that see the ring of a sequence that began in it.
        sequence = tl.load(seq_ids + tl.minimum(first + TILE, num_rows) - 1)
        start = tl.load(seq_starts + sequence)
        stop = tl.minimum(start + (TAPS - 1), tl.load(seq_starts + sequence + 1))
        more = tl.where(start >= first, stop - first - TILE, 0)
        for i in range(more.to(tl.int32)):
            _row(
                y,
                h,
                weight,
                norm,
                positions,
                seq_ids,
                seq_starts,
                state,
                slots,
                stream,
                out,
                eps,
                first + TILE + i,
                first,
                num_rows,
                y_row,
                h_row,
                weight_channel,
                weight_tap,
                norm_stride,
                state_slot,
                state_row,
                state_channel,
                WIDTH,
                FIRST,
                SECOND,
                TAPS,
                RING,
                PACKED,
            )
    if RING > 0:
        # Everything is read before anything is overwritten.
        tl.debug_barrier()
        for i in range(TILE):
            row = tl.minimum(first + i, num_rows - 1)
            sequence = tl.load(seq_ids + row)
            start, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
            slot = tl.load(slots + sequence)
            begin = tl.maximum(start, end - RING)
            is_mine = (first + i == start) & (slot >= 0)
            for j in range(tl.where(is_mine, end - begin, 0).to(tl.int32)):
                _remember(
                    y,
                    state,
                    positions,
                    begin + j,
                    slot,
                    tl.arange(0, FIRST),
                    y_row,
                    state_slot,
                    state_row,
                    state_channel,
                    WIDTH,
                    RING,
                )
                if SECOND > 0:
                    _remember(
                        y,
                        state,
                        positions,
                        begin + j,
                        slot,
                        FIRST + tl.arange(0, SECOND),
                        y_row,
                        state_slot,
                        state_row,
                        state_channel,
                        WIDTH,
                        RING,
                    )


def chunks_of(width: int) -> tuple[int, int]:
    """Columns of the first and of the second chunk of a row (0: there is none)."""
    second = width - exact.FOLD
    first = min(triton.next_power_of_2(width), exact.FOLD)
    return first, triton.next_power_of_2(second) if second > 0 else 0


def covers(y_ND: Tensor, h_ND: Tensor, conv_DK: Tensor, norm_D: Tensor) -> bool:
    """Whether the kernel has these dtypes and widths."""
    same = {x.dtype for x in (y_ND, h_ND, conv_DK, norm_D)}
    is_covered = len(same) == 1 and same <= set(COVERED)
    return is_covered and 0 < y_ND.shape[1] <= MOST and conv_DK.shape[1] > 0


def is_packed(conv_DK: Tensor) -> bool:
    """Whether the four taps of a channel can be read as one integer."""
    if conv_DK.dtype != torch.bfloat16 or conv_DK.shape[1] != 4 or not conv_DK.is_contiguous():
        return False
    return conv_DK.storage_offset() % 4 == 0


def residual_norm(
    y_ND: Tensor,
    h_ND: Tensor,
    conv_DK: Tensor,
    norm_D: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    eps: float,
    state_LRC: Tensor | None,
    slots_S: Tensor | None,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """A negative slot (of a padding sequence) is neither read nor written."""
    num_rows, width = y_ND.shape
    stream_ND, out_ND = (
        torch.empty_like(h_ND, memory_format=torch.contiguous_format) for _ in "hx"
    )
    if not num_rows:
        return stream_ND, out_ND
    y_ND, h_ND = (x if x.stride(1) == 1 else x.contiguous() for x in (y_ND, h_ND))
    ring = 0 if state_LRC is None else state_LRC.shape[1]
    # Without a ring, any tensors stand in for its arguments: they are not looked at.
    state = y_ND if state_LRC is None or not ring else state_LRC
    first, second = chunks_of(width)
    tile = rows or (1 if num_rows < MANY else ROWS)
    _kernel[(triton.cdiv(num_rows, tile),)](
        y_ND,
        h_ND,
        conv_DK,
        norm_D,
        positions_N.contiguous(),
        seq_ids_N.contiguous(),
        seq_starts_S1.contiguous(),
        state,
        seq_starts_S1 if slots_S is None or not ring else slots_S.contiguous(),
        stream_ND,
        out_ND,
        float(eps),
        num_rows,
        y_ND.stride(0),
        h_ND.stride(0),
        *conv_DK.stride(),
        norm_D.stride(0),
        *(state.stride() if ring else (0, 0, 0)),
        WIDTH=width,
        FIRST=first,
        SECOND=second,
        TAPS=conv_DK.shape[1],
        RING=ring,
        TILE=tile,
        PACKED=is_packed(conv_DK),
        num_warps=num_warps or (8 if width > 1024 else 4),
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return stream_ND, out_ND
