"""The convolution over tiles of rows and channels. Read `_convolved`: it alone computes.

`convolved_row` is the same of one row, for kernels that join it with what follows
(residual_norm, attention_prologue).

With a state ring, new inputs overwrite rows that the first outputs of the same sequence may still
need. A batch of few rows per sequence (decode, verify) is one launch: a program owns some channels
of one whole sequence, computes all of its rows, then writes the ring. A batch of many rows is two
launches: tiles of rows, then the rings.

The backward, without a ring, is a launch over tiles that also writes each tile's part of the
weight's gradient, and the sum of those parts.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.triton_math import tree_sum

SHORT = 16
"""Average rows per sequence up to which a sequence is walked by one program per channel block."""
ROWS, CHANNELS = 8, 256
"""Tile of a batch of many rows."""
SEQUENCE_ELEMENTS, SEQUENCE_CHANNELS = 2048, 512
"""Rows times channels of a program that walks a sequence, and most channels of it."""
MIN_CHANNELS = 64
"""Of any program: 128 bytes in bf16."""
BACKWARD_ROWS, BACKWARD_CHANNELS = 64, 32
"""Tile of the backward; the rows of a part of the weight's gradient, whatever the batch."""
NOWHERE = tl.constexpr(1 << 40)
"""A position beyond any."""
COVERED = (torch.bfloat16, torch.float32)


@triton.jit
def _convolved(
    x,
    weight,
    state,
    row,
    index,
    position,
    slot,
    valid,
    channel,
    inside,
    x_row,
    x_channel,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """Outputs [T, C] in fp32: oldest tap first, own input last, each operation rounded.

    row [T] of the batch, index [T] in its sequence, position, slot and valid [T]; channel and
    inside [C]. RING is 0 without a state.
    """
    # Most tiles of a long sequence lie too far behind its start to see the ring.
    sees_ring = tl.min(tl.where(valid, index, TAPS), axis=0) < TAPS - 1
    is_here = valid[:, None] & inside[None, :]
    own = tl.load(
        x + row[:, None] * x_row + channel[None, :] * x_channel, mask=is_here, other=0.0
    ).to(tl.float32)
    for step in tl.static_range(TAPS):
        back = TAPS - 1 - step
        tap = tl.load(weight + channel * weight_channel + step * weight_tap, mask=inside, other=0.0)
        tap = tap.to(tl.float32)[None, :]
        if back == 0:
            value = own
        else:
            in_batch = (index >= back)[:, None] & is_here
            at = (row - back)[:, None] * x_row + channel[None, :] * x_channel
            value = tl.load(x + at, mask=in_batch, other=0.0).to(tl.float32)
            if RING > 0:  # noqa: SIM102 (known when compiled, the other not)
                if sees_ring:
                    oldest = back + tl.where(slot >= 0, 0, NOWHERE)
                    is_kept = ((index < back) & (position >= oldest))[:, None] & is_here
                    at_row = slot * state_slot + ((position - back) % RING) * state_row
                    at = at_row[:, None] + channel[None, :] * state_channel
                    kept = tl.load(state + at, mask=is_kept, other=0.0).to(tl.float32)
                    value = tl.where(is_kept, kept, value)
        if step == 0:
            total = tap * value
        else:
            total = total + tap * value
    return total + own


@triton.jit
def _remember(
    x,
    state,
    positions,
    start,
    end,
    slot,
    channel,
    inside,
    x_row,
    x_channel,
    state_slot,
    state_row,
    state_channel,
    RING: tl.constexpr,
    RING_ROWS: tl.constexpr,
):
    """Writes the last RING inputs of one sequence to its slot."""
    row = tl.maximum(start, end - RING) + tl.arange(0, RING_ROWS)
    valid = row < tl.where(slot >= 0, end, start)
    position = tl.load(positions + row, mask=valid, other=0)
    is_here = valid[:, None] & inside[None, :]
    value = tl.load(x + row[:, None] * x_row + channel[None, :] * x_channel, mask=is_here)
    at_row = slot * state_slot + (position % RING) * state_row
    tl.store(state + at_row[:, None] + channel[None, :] * state_channel, value, mask=is_here)


@triton.jit
def _put(
    y,
    residual,
    out,
    row,
    valid,
    channel,
    inside,
    num_channels,
    residual_row,
    ADDS: tl.constexpr,
):
    """Writes outputs [T, C], with ADDS their sum with the residual: both rounded."""
    is_here = valid[:, None] & inside[None, :]
    y = y.to(out.dtype.element_ty)
    if ADDS:
        at = row[:, None] * residual_row + channel[None, :]
        before = tl.load(residual + at, mask=is_here, other=0.0).to(tl.float32)
        y = (before + y.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * num_channels + channel[None, :], y, mask=is_here)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x,
    weight,
    positions,
    seq_ids,
    seq_starts,
    state,
    slots,
    residual,
    out,
    num_rows,
    num_channels,
    x_row,
    x_channel,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    residual_row,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = row < num_rows
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < num_channels
    sequence = tl.load(seq_ids + row, mask=valid, other=0)
    index = row - tl.load(seq_starts + sequence, mask=valid, other=0)
    position = index
    slot = index
    if RING > 0:
        position = tl.load(positions + row, mask=valid, other=0)
        slot = tl.load(slots + sequence, mask=valid, other=-1)
    y = _convolved(
        x,
        weight,
        state,
        row,
        index,
        position,
        slot,
        valid,
        channel,
        inside,
        x_row,
        x_channel,
        weight_channel,
        weight_tap,
        state_slot,
        state_row,
        state_channel,
        TAPS,
        RING,
    )
    _put(y, residual, out, row, valid, channel, inside, num_channels, residual_row, ADDS)


@triton.jit
def _rings_kernel(
    x,
    positions,
    seq_starts,
    state,
    slots,
    num_channels,
    x_row,
    x_channel,
    state_slot,
    state_row,
    state_channel,
    RING: tl.constexpr,
    RING_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    _remember(
        x,
        state,
        positions,
        start,
        end,
        tl.load(slots + sequence),
        channel,
        channel < num_channels,
        x_row,
        x_channel,
        state_slot,
        state_row,
        state_channel,
        RING,
        RING_ROWS,
    )


@triton.jit
def _sequences_kernel(
    x,
    weight,
    positions,
    seq_starts,
    state,
    slots,
    residual,
    out,
    num_channels,
    x_row,
    x_channel,
    weight_channel,
    weight_tap,
    state_slot,
    state_row,
    state_channel,
    residual_row,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    RING_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < num_channels
    start, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    slot = tl.load(slots + sequence)
    for tile in range(tl.cdiv(end - start, TILE).to(tl.int32)):
        index = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        row = start + index
        valid = row < end
        position = tl.load(positions + row, mask=valid, other=0)
        y = _convolved(
            x,
            weight,
            state,
            row,
            index,
            position,
            slot + index * 0,
            valid,
            channel,
            inside,
            x_row,
            x_channel,
            weight_channel,
            weight_tap,
            state_slot,
            state_row,
            state_channel,
            TAPS,
            RING,
        )
        _put(y, residual, out, row, valid, channel, inside, num_channels, residual_row, ADDS)
    # Everything is read before anything is overwritten.
    tl.debug_barrier()
    _remember(
        x,
        state,
        positions,
        start,
        end,
        slot,
        channel,
        inside,
        x_row,
        x_channel,
        state_slot,
        state_row,
        state_channel,
        RING,
        RING_ROWS,
    )


def short_conv(
    x_NC: Tensor,
    weight_CK: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    state_LRC: Tensor | None,
    slots_S: Tensor | None,
    *,
    residual_NC: Tensor | None = None,
    short: int = SHORT,
    rows: int = ROWS,
    channels: int = CHANNELS,
    sequence_elements: int = SEQUENCE_ELEMENTS,
    num_warps: int | None = None,
) -> Tensor:
    """A negative slot (of a padding sequence) is neither read nor written. `residual_NC`, of the
    dtype of x and with neighbouring channels, is added to the rounded outputs."""
    for tensor in (x_NC, weight_CK, state_LRC):
        if tensor is not None and tensor.dtype not in COVERED:
            raise dispatch.no_kernel(f"short_conv with {tensor.dtype}", x_NC)
    num_rows, num_channels = x_NC.shape
    num_sequences, taps = seq_starts_S1.shape[0] - 1, weight_CK.shape[1]
    out_NC = torch.empty((num_rows, num_channels), dtype=x_NC.dtype, device=x_NC.device)
    if not num_rows or not num_channels:
        return out_NC
    ring = 0 if state_LRC is None else state_LRC.shape[1]
    # Without a ring, any tensors stand in for its arguments: they are not looked at.
    state = x_NC if state_LRC is None or not ring else state_LRC
    slots = seq_starts_S1 if slots_S is None or not ring else slots_S.contiguous()
    state_strides = state.stride() if ring else (0, 0, 0)
    positions, starts = positions_N.contiguous(), seq_starts_S1.contiguous()
    width = triton.next_power_of_2(num_channels)
    options = {"num_warps": num_warps or 4, "enable_fp_fusion": False}
    adds = residual_NC is not None
    residual = x_NC if residual_NC is None else residual_NC
    ring_rows = triton.next_power_of_2(max(ring, 1))
    if ring and num_rows <= short * num_sequences:
        tile = triton.next_power_of_2(triton.cdiv(num_rows, num_sequences))
        most = min(SEQUENCE_CHANNELS, max(MIN_CHANNELS, sequence_elements // tile))
        columns = min(width, most)
        options["num_warps"] = num_warps or (2 if tile == 1 else 4)
        _sequences_kernel[(num_sequences, triton.cdiv(num_channels, columns))](
            x_NC,
            weight_CK,
            positions,
            starts,
            state,
            slots,
            residual,
            out_NC,
            num_channels,
            *x_NC.stride(),
            *weight_CK.stride(),
            *state_strides,
            residual.stride(0),
            TAPS=taps,
            RING=ring,
            RING_ROWS=ring_rows,
            TILE=tile,
            COLUMNS=columns,
            ADDS=adds,
            **options,
        )
        return out_NC
    columns = min(width, channels)
    _rows_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_channels, columns))](
        x_NC,
        weight_CK,
        positions,
        seq_ids_N.contiguous(),
        starts,
        state,
        slots,
        residual,
        out_NC,
        num_rows,
        num_channels,
        *x_NC.stride(),
        *weight_CK.stride(),
        *state_strides,
        residual.stride(0),
        TAPS=taps,
        RING=ring,
        TILE=rows,
        COLUMNS=columns,
        ADDS=adds,
        **options,
    )
    if ring:
        columns = min(width, SEQUENCE_CHANNELS)
        _rings_kernel[(num_sequences, triton.cdiv(num_channels, columns))](
            x_NC,
            positions,
            starts,
            state,
            slots,
            num_channels,
            *x_NC.stride(),
            *state_strides,
            RING=ring,
            RING_ROWS=ring_rows,
            COLUMNS=columns,
            **options,
        )
    return out_NC


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    x,
    grad,
    weight,
    seq_ids,
    seq_starts,
    grad_x,
    parts,
    num_rows,
    num_channels,
    x_row,
    x_channel,
    grad_row,
    grad_channel,
    weight_channel,
    weight_tap,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
):
    """See gradient.py: row n was the input of row n + back of the same sequence."""
    block = tl.program_id(0).to(tl.int64)
    row = block * TILE + tl.arange(0, TILE)
    valid = row < num_rows
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = channel < num_channels
    is_here = valid[:, None] & inside[None, :]
    grad_at = grad + (channel * grad_channel)[None, :]
    own = tl.load(grad_at + (row * grad_row)[:, None], mask=is_here, other=0.0).to(tl.float32)
    total = own
    value = own
    if NEEDS_WEIGHT:
        x_at = x + (row * x_row)[:, None] + (channel * x_channel)[None, :]
        value = tl.load(x_at, mask=is_here, other=0.0).to(tl.float32)
    for back in tl.static_range(TAPS):
        if back == 0:
            given = own
        else:
            later = row + back
            is_row = later < num_rows
            sequence = tl.load(seq_ids + later, mask=is_row, other=0)
            start = tl.load(seq_starts + sequence, mask=is_row, other=0)
            in_sequence = (is_row & (later - start >= back))[:, None] & inside[None, :]
            later_at = grad_at + (later * grad_row)[:, None]
            given = tl.load(later_at, mask=in_sequence, other=0.0).to(tl.float32)
        if NEEDS_X:
            tap_at = weight + channel * weight_channel + (TAPS - 1 - back) * weight_tap
            tap = tl.load(tap_at, mask=inside, other=0.0).to(tl.float32)
            total = total + given * tap[None, :]
        if NEEDS_WEIGHT:
            part = tree_sum(tl.trans(given * value))
            at = (block * num_channels + channel) * TAPS + (TAPS - 1 - back)
            tl.store(parts + at, part, mask=inside)
    if NEEDS_X:
        at = row[:, None] * num_channels + channel[None, :]
        tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=is_here)


def short_conv_backward(
    x_NC: Tensor,
    weight_CK: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    grad_NC: Tensor,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
    num_warps: int = 4,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x (in its dtype) and of the weight (fp32 [C, K]), None where not needed."""
    for tensor in (x_NC, weight_CK, grad_NC):
        if tensor.dtype not in COVERED:
            raise dispatch.no_kernel(f"the backward of short_conv with {tensor.dtype}", x_NC)
    (num_rows, num_channels), taps = x_NC.shape, weight_CK.shape[1]
    grad_x = x_NC.new_empty(x_NC.shape) if needs_x else None
    if not x_NC.numel() or not (needs_x or needs_weight):
        none = x_NC.new_zeros(weight_CK.shape, dtype=torch.float32) if needs_weight else None
        return grad_x, none
    blocks = triton.cdiv(num_rows, BACKWARD_ROWS)
    columns = min(triton.next_power_of_2(num_channels), BACKWARD_CHANNELS)
    parts = None
    if needs_weight:
        parts = x_NC.new_empty((blocks, num_channels, taps), dtype=torch.float32)
    _backward[(blocks, triton.cdiv(num_channels, columns))](
        x_NC,
        grad_NC,
        weight_CK,
        seq_ids_N.contiguous(),
        seq_starts_S1.contiguous(),
        x_NC if grad_x is None else grad_x,  # what is not needed is not looked at
        x_NC if parts is None else parts,
        num_rows,
        num_channels,
        *x_NC.stride(),
        *grad_NC.stride(),
        *weight_CK.stride(),
        TAPS=taps,
        TILE=BACKWARD_ROWS,
        COLUMNS=columns,
        NEEDS_X=needs_x,
        NEEDS_WEIGHT=needs_weight,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return grad_x, None if parts is None else parts.sum(0)
