"""Keys and values into their pages in one launch: a program copies a run of columns of one row."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

BLOCK = 1024
"""Columns (KV heads times channels) of one program."""


@triton.jit
def _kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_row,
    k_head,
    k_channel,
    v_row,
    v_head,
    v_channel,
    page_size,
    page_stride,
    offset_stride,
    head_stride,
    channel_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head, channel = column // CHANNELS, column % CHANNELS
    is_written = column < tl.where(slot >= 0, WIDTH, 0)
    place = (slot // page_size) * page_stride + (slot % page_size) * offset_stride
    at = place + head * head_stride + channel * channel_stride
    keys = tl.load(k + row * k_row + head * k_head + channel * k_channel, mask=is_written)
    values = tl.load(v + row * v_row + head * v_head + channel * v_channel, mask=is_written)
    tl.store(k_pages + at, keys, mask=is_written)
    tl.store(v_pages + at, values, mask=is_written)


def kv_write(
    k_NUC: Tensor,
    v_NUC: Tensor,
    k_pages_PTUC: Tensor,
    v_pages_PTUC: Tensor,
    slots_N: Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = 4,
) -> None:
    """Bits are copied as they are, so any dtype and any strides will do."""
    if k_pages_PTUC.stride() != v_pages_PTUC.stride():
        raise dispatch.no_kernel("kv_write of pages with unequal strides", k_NUC)
    num_rows, heads, channels = k_NUC.shape
    width = heads * channels
    if not num_rows or not width:
        return
    columns = min(triton.next_power_of_2(width), block)
    _kernel[(num_rows, triton.cdiv(width, columns))](
        k_NUC,
        v_NUC,
        k_pages_PTUC,
        v_pages_PTUC,
        slots_N.contiguous(),
        *k_NUC.stride(),
        *v_NUC.stride(),
        k_pages_PTUC.shape[1],
        *k_pages_PTUC.stride(),
        WIDTH=width,
        CHANNELS=channels,
        COLUMNS=columns,
        num_warps=num_warps,
    )
