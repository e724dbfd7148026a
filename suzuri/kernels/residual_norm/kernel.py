"""Convolution, residual and norm. Where every sequence has one row, as in decoding, they are one
launch, a program a row, and what is added may be the outputs of experts: their weighted sum is then
made there, as moe_combine makes it. Otherwise the convolution adds the residual, and the norm
follows: a program that walks whole rows with their neighbours waits more than it saves (measured).

The sum of squares is that of rms_norm's kernel: chunks of exact.FOLD columns, each a tree.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.rms_norm.kernel import rms_norm
from suzuri.kernels.short_conv.kernel import short_conv
from suzuri.kernels.short_conv.kernel_rows import convolved_row, is_packed
from suzuri.kernels.triton_math import tree_sum

COVERED = (torch.bfloat16, torch.float32)
MOST = 2 * exact.FOLD
"""Columns of the widest row: a program holds two chunks."""


@triton.jit
def _mixed(
    y,
    h,
    weight,
    state,
    row,
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
    """The stream's new row [C] in fp32, rounded to its dtype."""
    stream = tl.load(h + row * h_row + column, mask=column < WIDTH, other=0.0)
    total = convolved_row(
        y,
        weight,
        state,
        row,
        row * 0,
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
        True,
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
    column = tl.arange(0, FIRST)
    factor = tl.load(norm + column * norm_stride, mask=column < WIDTH, other=0.0)
    own = _own(y, inverse, weights, row, column, y_row, WIDTH, SLOTS)
    value = _mixed(
        y,
        h,
        weight,
        state,
        row,
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
) -> tuple[Tensor, Tensor]:
    """A negative slot (of a padding sequence) is neither read nor written."""
    h_ND = h_ND if h_ND.stride(1) == 1 else h_ND.contiguous()
    sequences = (positions_N, seq_ids_N, seq_starts_S1)
    stream_ND = short_conv(y_ND, conv_DK, *sequences, state_LRC, slots_S, residual_NC=h_ND)
    return stream_ND, rms_norm(stream_ND, norm_D, eps, h_ND.dtype)


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
    num_warps: int = 4,
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
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return stream_ND, out_ND
