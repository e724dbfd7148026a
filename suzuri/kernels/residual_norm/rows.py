"""A row of residual_norm, block by block.

What crosses warps is most of a program's time. So the squares of a row's blocks are added as the
upper levels of the tree of exact.tree_sum add them, element by element; only its last levels,
within a block, cross threads, those of both chunks together.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from suzuri.kernels.short_conv.kernel import convolved_row
from suzuri.kernels.triton_math import tree_sum


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
def _block(
    y,
    inverse,
    weights,
    h,
    weight,
    state,
    stream,
    row,
    index,
    position,
    slot,
    end,
    first,
    y_row,
    h_row,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
    IS_SINGLE: tl.constexpr,
):
    """Writes a block of the stream's new row, of a single row its input to the ring too; the
    block's squares [BLOCK]."""
    column = first + tl.arange(0, BLOCK)
    own = _own(y, inverse, weights, row, column, y_row, WIDTH, SLOTS)
    before = tl.load(h + row * h_row + column, mask=column < WIDTH, other=0.0)
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
    value = (before.to(tl.float32) + total).to(before.dtype)
    if IS_SINGLE:
        if RING < TAPS:
            tl.debug_barrier()  # the oldest input lies where the new one goes
        at = state + slot * state_slot + (position % RING) * state_row + column * state_channel
        tl.store(at, own, mask=column < tl.where(slot >= 0, WIDTH, 0))
    tl.store(stream + row * WIDTH + column, value, mask=column < end)
    wide = value.to(tl.float32)
    return wide * wide


@triton.jit
def _blocks(
    y,
    inverse,
    weights,
    h,
    weight,
    state,
    stream,
    row,
    index,
    position,
    slot,
    end,
    first,
    y_row,
    h_row,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
    IS_SINGLE: tl.constexpr,
):
    """COUNT blocks, STEP columns from one to the next; their squares added as the tree adds them:
    the ones in even places, those in odd places, and both sums."""
    if COUNT == 1:
        total = _block(
            y,
            inverse,
            weights,
            h,
            weight,
            state,
            stream,
            row,
            index,
            position,
            slot,
            end,
            first,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            WIDTH,
            BLOCK,
            TAPS,
            RING,
            SLOTS,
            PACKED,
            IS_SINGLE,
        )
    else:
        total = _blocks(
            y,
            inverse,
            weights,
            h,
            weight,
            state,
            stream,
            row,
            index,
            position,
            slot,
            end,
            first,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            COUNT // 2,
            2 * STEP,
            WIDTH,
            BLOCK,
            TAPS,
            RING,
            SLOTS,
            PACKED,
            IS_SINGLE,
        )
        total += _blocks(
            y,
            inverse,
            weights,
            h,
            weight,
            state,
            stream,
            row,
            index,
            position,
            slot,
            end,
            first + STEP,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            COUNT // 2,
            2 * STEP,
            WIDTH,
            BLOCK,
            TAPS,
            RING,
            SLOTS,
            PACKED,
            IS_SINGLE,
        )
    return total


@triton.jit
def _norm(
    norm,
    stream,
    out,
    scale,
    row,
    end,
    first,
    norm_stride,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms COUNT blocks of the stream's row, from the column `first` on."""
    for place in tl.static_range(COUNT):
        column = first + place * BLOCK + tl.arange(0, BLOCK)
        inside = column < end
        value = tl.load(stream + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(norm + column * norm_stride, mask=inside, other=0.0)
        tl.store(out + row * WIDTH + column, normed(value, scale, factor, out), mask=inside)


@triton.jit
def whole_row(
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
    index,
    position,
    slot,
    end,
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
    IS_SINGLE: tl.constexpr,
):
    """One row; nothing of it is written from the column `end` on."""
    found = _blocks(
        y,
        inverse,
        weights,
        h,
        weight,
        state,
        stream,
        row,
        index,
        position,
        slot,
        end,
        0,
        y_row,
        h_row,
        weight_channel,
        weight_tap,
        state_slot,
        state_row,
        state_channel,
        FIRST // BLOCK,
        BLOCK,
        WIDTH,
        BLOCK,
        TAPS,
        RING,
        SLOTS,
        PACKED,
        IS_SINGLE,
    )
    if SECOND > 0:
        later = _blocks(
            y,
            inverse,
            weights,
            h,
            weight,
            state,
            stream,
            row,
            index,
            position,
            slot,
            end,
            FIRST,
            y_row,
            h_row,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            SECOND // LATER,
            LATER,
            WIDTH,
            LATER,
            TAPS,
            RING,
            SLOTS,
            PACKED,
            IS_SINGLE,
        )
        if LATER == BLOCK:
            both = tree_sum(tl.trans(tl.join(found, later)))
            total = tl.sum(tl.reshape(both, (1, 2)), axis=1)
        else:
            total = tree_sum(tl.reshape(found, (1, BLOCK)))
            total += tree_sum(tl.reshape(later, (1, LATER)))
    else:
        total = tree_sum(tl.reshape(found, (1, BLOCK)))
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    tl.debug_barrier()  # other threads may have written what is read again
    _norm(norm, stream, out, scale, row, end, 0, norm_stride, FIRST // BLOCK, WIDTH, BLOCK)
    if SECOND > 0:
        _norm(norm, stream, out, scale, row, end, FIRST, norm_stride, SECOND // LATER, WIDTH, LATER)
