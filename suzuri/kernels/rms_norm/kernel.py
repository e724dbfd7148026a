"""RMSNorm in one launch: a program norms a few whole rows."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.triton_math import tree_sum

ELEMENTS = 1024
"""Of the rows of one program together; a longer row has a program to itself."""
LONG = 1024
"""Row from which a program is one warp: what would cross warps is most of its time (measured)."""
COVERED = (torch.bfloat16, torch.float32)


@triton.jit
def _load(x, start, column, valid, column_stride, WIDTH: tl.constexpr):
    inside = valid[:, None] & (column < WIDTH)[None, :]
    at = start[:, None] + column[None, :] * column_stride
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x,
    weight,
    out,
    eps,
    num_rows,
    inner_rows,
    outer_stride,
    inner_stride,
    column_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    start = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    column = tl.arange(0, CHUNK)
    value = _load(x, start, column, valid, column_stride, WIDTH)
    total = tree_sum(value * value)
    for chunk in tl.static_range(1, CHUNKS):
        value = _load(x, start, chunk * CHUNK + column, valid, column_stride, WIDTH)
        total = total + tree_sum(value * value)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    for chunk in tl.static_range(CHUNKS):
        place = chunk * CHUNK + column
        if CHUNKS > 1:  # the row is in the cache by now
            value = _load(x, start, place, valid, column_stride, WIDTH)
        inside = place < WIDTH
        factor = tl.load(weight + place * weight_stride, mask=inside, other=0.0).to(tl.float32)
        y = value * scale[:, None] * factor[None, :]
        at = row[:, None] * WIDTH + place[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


def rms_norm(
    x_ND: Tensor,
    weight_D: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    *,
    elements: int = ELEMENTS,
    num_warps: int | None = None,
) -> Tensor:
    for dtype in (x_ND.dtype, weight_D.dtype, out_dtype):
        if dtype not in COVERED:
            raise dispatch.no_kernel(f"rms_norm with {dtype}", x_ND)
    out_ND = torch.empty(x_ND.shape, dtype=out_dtype, device=x_ND.device)
    width = x_ND.shape[-1]
    if not out_ND.numel():
        return out_ND
    # Rows of one or two leading dims are read where they lie, whatever the strides.
    rows = x_ND if x_ND.dim() in (2, 3) else x_ND.reshape(-1, width)
    if rows.dim() == 2:
        rows = rows[:, None]
    num_rows, inner_rows = rows.shape[0] * rows.shape[1], rows.shape[1]
    chunk = min(triton.next_power_of_2(width), exact.FOLD)
    rows_per_program = max(1, elements // chunk)
    _kernel[(triton.cdiv(num_rows, rows_per_program),)](
        rows,
        weight_D,
        out_ND,
        float(eps),
        num_rows,
        inner_rows,
        *rows.stride(),
        weight_D.stride(0),
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.cdiv(width, chunk),
        ROWS=rows_per_program,
        num_warps=num_warps or (1 if chunk >= LONG else 2),
        enable_fp_fusion=False,  # squares are rounded before they are added
    )
    return out_ND
