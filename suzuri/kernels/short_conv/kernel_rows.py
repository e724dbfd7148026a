"""The convolution row by row, for kernels that do more with a row than convolve it.

Such a program has whole rows; those of a sequence that see its ring belong to the program that has
the first of them, which writes the ring after them.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def convolved_row(
    x,
    weight,
    state,
    row,
    index,
    position,
    slot,
    own,
    channel,
    x_row,
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
    """As `_convolved`, of one row: outputs in fp32, a tile of the shape of `channel`.

    row of the batch, index in its sequence, position and slot are numbers; `own`: the inputs of
    this row; channels from WIDTH on are left out. PACKED: see `is_packed`. IS_SINGLE: the row is
    alone in its sequence, and there is a ring.
    """
    inside = channel < WIDTH
    taps = channel
    if PACKED:
        taps = tl.load(weight.to(tl.pointer_type(tl.int64)) + channel, mask=inside, other=0)
    for step in tl.static_range(TAPS):
        back = TAPS - 1 - step
        if PACKED:
            tap = ((taps >> (16 * step)) & 0xFFFF).to(tl.int32) << 16
            tap = tap.to(tl.float32, bitcast=True)
        else:
            tap_at = weight + channel * weight_channel + step * weight_tap
            tap = tl.load(tap_at, mask=inside, other=0.0).to(tl.float32)
        if back == 0:
            value = own.to(tl.float32)
        else:
            value = own
            if not IS_SINGLE:
                in_batch = channel < tl.where(index >= back, WIDTH, 0)
                value = tl.load(x + (row - back) * x_row + channel, mask=in_batch, other=0.0)
            if RING > 0:
                is_seen = (index < back) & (position >= back) & (slot >= 0)
                in_ring = channel < tl.where(is_seen, WIDTH, 0)
                kept_at = state + slot * state_slot + ((position - back) % RING) * state_row
                kept = tl.load(kept_at + channel * state_channel, mask=in_ring, other=0.0)
                value = kept if IS_SINGLE else tl.where(in_ring, kept, value)
            value = value.to(tl.float32)
        if step == 0:
            total = tap * value
        else:
            total = total + tap * value
    return total + own.to(tl.float32)


@triton.jit
def rows_behind(seq_ids, seq_starts, first, num_rows, TILE: tl.constexpr, TAPS: tl.constexpr):
    """How many rows behind the tile from `first` on see the ring of a sequence that began in it."""
    sequence = tl.load(seq_ids + tl.minimum(first + TILE, num_rows) - 1)
    start = tl.load(seq_starts + sequence)
    stop = tl.minimum(start + (TAPS - 1), tl.load(seq_starts + sequence + 1))
    return tl.where(start >= first, stop - first - TILE, 0).to(tl.int32)


@triton.jit
def remember_begun(
    x,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    first,
    num_rows,
    channel,
    x_row,
    state_slot,
    state_row,
    state_channel,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the last RING inputs of every sequence that begins in the tile from `first` on."""
    inside = channel < WIDTH
    for i in range(TILE):
        sequence = tl.load(seq_ids + tl.minimum(first + i, num_rows - 1))
        start, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
        slot = tl.load(slots + sequence)
        begin = tl.maximum(start, end - RING)
        is_here = (first + i == start) & (slot >= 0)
        for j in range(tl.where(is_here, end - begin, 0).to(tl.int32)):
            value = tl.load(x + (begin + j) * x_row + channel, mask=inside)
            position = tl.load(positions + begin + j)
            at = state + slot * state_slot + (position % RING) * state_row
            tl.store(at + channel * state_channel, value, mask=inside)


def is_packed(weight_CK: Tensor) -> bool:
    """Whether the taps of a channel can be read as one integer: four in bf16, the oldest lowest."""
    if weight_CK.dtype != torch.bfloat16 or weight_CK.shape[1] != 4:
        return False
    return weight_CK.is_contiguous() and weight_CK.storage_offset() % 4 == 0
