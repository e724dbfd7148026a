"""Rows of a table in one launch."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

BLOCK = 2048
"""Columns of one program."""


@triton.jit
def _kernel(
    ids,
    weight,
    out,
    num_rows_of_table,
    row_stride,
    column_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(ids + row)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    is_found = (index >= 0) & (index < num_rows_of_table)
    at = index * row_stride + column * column_stride
    held = column < tl.where(is_found, WIDTH, 0)
    value = tl.load(weight + at, mask=held, other=float("nan"))
    tl.store(out + row * WIDTH + column, value, mask=inside)


def embedding(
    ids_N: Tensor, weight_VD: Tensor, *, block: int = BLOCK, num_warps: int = 4
) -> Tensor:
    """An id beyond the table gives a row of NaN: to raise, the host would have to wait for it."""
    if weight_VD.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"embedding of {weight_VD.dtype}", weight_VD)
    (num_rows,), (table_rows, width) = ids_N.shape, weight_VD.shape
    out_ND = torch.empty((num_rows, width), dtype=weight_VD.dtype, device=weight_VD.device)
    if not num_rows or not width:
        return out_ND
    columns = min(triton.next_power_of_2(width), block)
    _kernel[(num_rows, triton.cdiv(width, columns))](
        ids_N.contiguous(),
        weight_VD,
        out_ND,
        table_rows,
        *weight_VD.stride(),
        WIDTH=width,
        COLUMNS=columns,
        num_warps=num_warps,
    )
    return out_ND
