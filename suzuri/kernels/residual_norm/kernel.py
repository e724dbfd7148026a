"""Convolution, residual and norm in one launch: a program walks a few whole rows.

New inputs overwrite ring rows that the first rows of the same sequence may still need. So whoever
has the first row of a sequence also has all that see the ring, and writes the ring after them.

Where every sequence has one row, as in decoding, a program has one too, and what it adds may be the
outputs of experts: their weighted sum is then made here, as moe_combine makes it.

The sum of squares is that of rms_norm's kernel: chunks of exact.FOLD columns, each a tree.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.short_conv.kernel import (
    convolved_row,
    is_packed,
    remember_begun,
    rows_behind,
)
from suzuri.kernels.triton_math import tree_sum

COVERED = (torch.bfloat16, torch.float32)
MOST = 2 * exact.FOLD
"""Columns of the widest row: a program holds two chunks."""
MANY, ROWS = 1024, 4
"""Rows from which a program walks more than one, and how many: it reads an input once, not once
for every tap."""


@triton.jit
def _mixed(
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
    IS_SINGLE: tl.constexpr,
):
    """The stream's new row [C] in fp32, rounded to its dtype."""
    stream = tl.load(h + row * h_row + column, mask=column < WIDTH, other=0.0)
    total = convolved_row(
        y,
        weight,
        state,
        row,
        index,
        position,
        slot,
        own,
        column,
        y_row,
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
    )
    total = total.to(own.dtype).to(tl.float32)
    return (stream.to(tl.float32) + total).to(stream.dtype).to(tl.float32)


@triton.jit
def squares(value):
    """The tree sum of squares of value [C]: [1]."""
    return tree_sum(tl.reshape(value * value, (1, value.shape[0])))


@triton.jit
def normed(value, scale, factor, out):
    """The normed row in the dtype of `out`."""
    return (value * scale * factor.to(tl.float32)).to(out.dtype.element_ty)


@triton.jit
def put_normed(value, scale, weight, out, row, end, column, weight_stride, WIDTH: tl.constexpr):
    """Writes the columns before `end` of a row [C]: all, or none."""
    inside = column < end
    factor = tl.load(weight + column * weight_stride, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, normed(value, scale, factor, out), mask=inside)


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
    factor = tl.load(norm + column * norm_stride, mask=column < WIDTH, other=0.0)
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
    value = _mixed(
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
        False,
    )
    if SECOND > 0:
        later = FIRST + tl.arange(0, SECOND)
        second_factor = tl.load(norm + later * norm_stride, mask=later < WIDTH, other=0.0)
        second_own = tl.load(y + row * y_row + later, mask=later < WIDTH, other=0.0)
        second = _mixed(
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
            False,
        )
    # Loads above, sums below: a program waits for memory once.
    total = squares(value)
    if SECOND > 0:
        total = total + squares(second)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    at, normed_at = stream + row * WIDTH, out + row * WIDTH
    tl.store(at + column, value.to(stream.dtype.element_ty), mask=column < end)
    tl.store(normed_at + column, normed(value, scale, factor, out), mask=column < end)
    if SECOND > 0:
        tl.store(at + later, second.to(stream.dtype.element_ty), mask=later < end)
        tl.store(normed_at + later, normed(second, scale, second_factor, out), mask=later < end)


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
        for i in range(rows_behind(seq_ids, seq_starts, first, num_rows, TILE, TAPS)):
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
        remember_begun(
            y,
            positions,
            seq_ids,
            seq_starts,
            state,
            slots,
            first,
            num_rows,
            tl.arange(0, FIRST),
            y_row,
            state_slot,
            state_row,
            state_channel,
            WIDTH,
            RING,
            TILE,
        )
        if SECOND > 0:
            remember_begun(
                y,
                positions,
                seq_ids,
                seq_starts,
                state,
                slots,
                first,
                num_rows,
                FIRST + tl.arange(0, SECOND),
                y_row,
                state_slot,
                state_row,
                state_channel,
                WIDTH,
                RING,
                TILE,
            )


@triton.jit
def _own(y, inverse, weights, row, column, y_row, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    """The convolution's input [C] of a row: y, or with SLOTS the weighted sum of the row's slots,
    rounded."""
    inside = column < WIDTH
    if SLOTS == 0:
        own = tl.load(y + row * y_row + column, mask=inside, other=0.0)
    else:
        total = tl.zeros((column.shape[0],), dtype=tl.float32)
        for slot in tl.static_range(SLOTS):
            source = tl.load(inverse + row * SLOTS + slot)
            weight = tl.load(weights + row * SLOTS + slot)
            value = tl.load(y + source * y_row + column, mask=inside, other=0.0).to(tl.float32)
            # The first product stands alone: 0 + -0 would lose its sign.
            total = weight * value if slot == 0 else total + weight * value
        own = total.to(y.dtype.element_ty)
    return own


@triton.jit
def _single_kernel(
    y,
    inverse,
    weights,
    h,
    weight,
    norm,
    positions,
    state,
    slots,
    stream,
    out,
    eps,
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
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    index = row * 0
    column = tl.arange(0, FIRST)
    factor = tl.load(norm + column * norm_stride, mask=column < WIDTH, other=0.0)
    own = _own(y, inverse, weights, row, column, y_row, WIDTH, SLOTS)
    value = _mixed(
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
        True,
    )
    if SECOND > 0:
        later = FIRST + tl.arange(0, SECOND)
        second_factor = tl.load(norm + later * norm_stride, mask=later < WIDTH, other=0.0)
        second_own = _own(y, inverse, weights, row, later, y_row, WIDTH, SLOTS)
        second = _mixed(
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
            True,
        )
    # Everything is read before anything is overwritten.
    tl.debug_barrier()
    kept_at = state + slot * state_slot + (position % RING) * state_row
    end = tl.where(slot >= 0, WIDTH, 0)
    tl.store(kept_at + column * state_channel, own, mask=column < end)
    total = squares(value)
    if SECOND > 0:
        total = total + squares(second)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    at, normed_at = stream + row * WIDTH, out + row * WIDTH
    tl.store(at + column, value.to(stream.dtype.element_ty), mask=column < WIDTH)
    tl.store(normed_at + column, normed(value, scale, factor, out), mask=column < WIDTH)
    if SECOND > 0:
        tl.store(kept_at + later * state_channel, second_own, mask=later < end)
        tl.store(at + later, second.to(stream.dtype.element_ty), mask=later < WIDTH)
        tl.store(normed_at + later, normed(second, scale, second_factor, out), mask=later < WIDTH)


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


def single_rows(
    y_XD: Tensor,
    inverse_M: Tensor | None,
    weights_NJ: Tensor | None,
    h_ND: Tensor,
    conv_DK: Tensor,
    norm_D: Tensor,
    positions_N: Tensor,
    eps: float,
    state_LRC: Tensor,
    slots_S: Tensor,
    *,
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Of sequences of one row each. y_XD: what is added [N, D]; with `inverse_M` and `weights_NJ`
    (of moe_combine) the outputs of experts [N * J, D]. The ring has a row at least."""
    num_rows, width = h_ND.shape
    stream_ND, out_ND = h_ND.new_empty(h_ND.shape), h_ND.new_empty(h_ND.shape)
    if not num_rows:
        return stream_ND, out_ND
    y_XD, h_ND = (x if x.stride(1) == 1 else x.contiguous() for x in (y_XD, h_ND))
    first, second = chunks_of(width)
    has_slots = inverse_M is not None and weights_NJ is not None
    _single_kernel[(num_rows,)](
        y_XD,
        inverse_M.contiguous() if has_slots else positions_N,  # not looked at without slots
        weights_NJ.contiguous() if has_slots else y_XD,
        h_ND,
        conv_DK,
        norm_D,
        positions_N.contiguous(),
        state_LRC,
        slots_S.contiguous(),
        stream_ND,
        out_ND,
        float(eps),
        y_XD.stride(0),
        h_ND.stride(0),
        *conv_DK.stride(),
        norm_D.stride(0),
        *state_LRC.stride(),
        WIDTH=width,
        FIRST=first,
        SECOND=second,
        TAPS=conv_DK.shape[1],
        RING=state_LRC.shape[1],
        SLOTS=weights_NJ.shape[1] if has_slots else 0,
        PACKED=is_packed(conv_DK),
        num_warps=num_warps or (8 if width > 1024 else 4),
        enable_fp_fusion=False,
    )
    return stream_ND, out_ND
