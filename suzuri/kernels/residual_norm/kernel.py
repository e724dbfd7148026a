"""Convolution, residual and norm in one launch: a program has one row.

New inputs overwrite ring rows that the first rows of the same sequence may still need. So whoever
has the first row of a sequence also has all that see the ring, and writes the ring after them.

Where every sequence has one row, as in decoding, what is added may be the outputs of experts: their
weighted sum is then made here, as moe_combine makes it.

The sum of squares is that of rms_norm's kernel: chunks of exact.FOLD columns, each a tree.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.residual_norm.rows import whole_row
from suzuri.kernels.short_conv.kernel import is_packed, remember_begun, rows_behind

COVERED = (torch.bfloat16, torch.float32)
MOST = 2 * exact.FOLD
"""Columns of the widest row: two chunks."""
BLOCK, WARPS = 512, 4


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
    BLOCK: tl.constexpr,
    LATER: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One row. Nothing is written if it sees a ring that another program has: `first` is this
    program's first row."""
    is_row = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    sequence = tl.load(seq_ids + row)
    start = tl.load(seq_starts + sequence)
    index = row - start
    position = index
    slot = index
    is_written = is_row
    if RING > 0:
        position = tl.load(positions + row)
        slot = tl.load(slots + sequence)
        is_written = is_row & ((start >= first) | (index >= TAPS - 1))
    whole_row(
        y,
        y,
        y,
        h,
        weight,
        norm,
        state,
        stream,
        out,
        eps,
        row,
        index,
        position,
        slot,
        tl.where(is_written, WIDTH, 0),
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
        BLOCK,
        LATER,
        TAPS,
        RING,
        0,
        PACKED,
        False,
    )


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
    BLOCK: tl.constexpr,
    LATER: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    PACKED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64)
    behind = 0
    if RING > 0 and TAPS > 2:
        behind = rows_behind(seq_ids, seq_starts, first, num_rows, 1, TAPS)
    for i in range(1 + behind):
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
            BLOCK,
            LATER,
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
            1,
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
                1,
            )


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
    BLOCK: tl.constexpr,
    LATER: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    whole_row(
        y,
        inverse,
        weights,
        h,
        weight,
        norm,
        state,
        stream,
        out,
        eps,
        row,
        row * 0,
        tl.load(positions + row),
        tl.load(slots + row),
        WIDTH,
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
        BLOCK,
        LATER,
        TAPS,
        RING,
        SLOTS,
        PACKED,
        True,
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
    block: int = BLOCK,
    num_warps: int = WARPS,
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
    _kernel[(num_rows,)](
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
        BLOCK=min(block, first),
        LATER=min(block, second),
        TAPS=conv_DK.shape[1],
        RING=ring,
        PACKED=is_packed(conv_DK),
        num_warps=num_warps,
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
    block: int = BLOCK,
    num_warps: int = WARPS,
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
        BLOCK=min(block, first),
        LATER=min(block, second),
        TAPS=conv_DK.shape[1],
        RING=state_LRC.shape[1],
        SLOTS=weights_NJ.shape[1] if has_slots else 0,
        PACKED=is_packed(conv_DK),
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return stream_ND, out_ND
