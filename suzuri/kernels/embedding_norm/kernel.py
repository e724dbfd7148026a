"""Rows of a table and two norms in one launch: a program has one row, in the chunks of rms_norm."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.residual_norm.kernel import MOST, chunks_of, put_normed, squares

COVERED = (torch.bfloat16, torch.float32)


@triton.jit
def _looked_up(weight, index, end, column, row_stride, column_stride):
    """Row [C] of the table in fp32; NaN from `end` on."""
    at = weight + index * row_stride + column * column_stride
    return tl.load(at, mask=column < end, other=float("nan")).to(tl.float32)


@triton.jit
def _normed(value, scale, weight, column, weight_stride, stream, WIDTH: tl.constexpr):
    """The first norm of a chunk [C] in fp32, rounded to the dtype of `stream`, zero outside."""
    inside = column < WIDTH
    factor = tl.load(weight + column * weight_stride, mask=inside, other=0.0).to(tl.float32)
    y = (value * scale * factor).to(stream.dtype.element_ty)
    return tl.where(inside, y.to(tl.float32), 0.0)


@triton.jit
def _kernel(
    ids,
    weight,
    first_norm,
    second_norm,
    stream,
    out,
    eps,
    num_rows_of_table,
    row_stride,
    column_stride,
    first_stride,
    second_stride,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(ids + row)
    end = tl.where((index >= 0) & (index < num_rows_of_table), WIDTH, 0)
    column = tl.arange(0, FIRST)
    value = _looked_up(weight, index, end, column, row_stride, column_stride)
    total = squares(tl.where(column < WIDTH, value, 0.0))
    if SECOND > 0:
        later = FIRST + tl.arange(0, SECOND)
        second = _looked_up(weight, index, end, later, row_stride, column_stride)
        total = total + squares(tl.where(later < WIDTH, second, 0.0))
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    value = _normed(value, scale, first_norm, column, first_stride, stream, WIDTH)
    at = stream + row * WIDTH
    tl.store(at + column, value.to(stream.dtype.element_ty), mask=column < WIDTH)
    total = squares(value)
    if SECOND > 0:
        second = _normed(second, scale, first_norm, later, first_stride, stream, WIDTH)
        tl.store(at + later, second.to(stream.dtype.element_ty), mask=later < WIDTH)
        total = total + squares(second)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + eps)
    put_normed(value, scale, second_norm, out, row, WIDTH, column, second_stride, WIDTH)
    if SECOND > 0:
        put_normed(second, scale, second_norm, out, row, WIDTH, later, second_stride, WIDTH)


def covers(weight_VD: Tensor, first_D: Tensor, second_D: Tensor) -> bool:
    """Whether the kernel has these dtypes and widths."""
    same = {x.dtype for x in (weight_VD, first_D, second_D)}
    return len(same) == 1 and same <= set(COVERED) and 0 < weight_VD.shape[1] <= MOST


def embedding_norm(
    ids_N: Tensor,
    weight_VD: Tensor,
    first_D: Tensor,
    second_D: Tensor,
    eps: float,
    num_rows: int | None,
    *,
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """An id beyond the table gives rows of NaN, as in embedding's kernel."""
    (count,), (table_rows, width) = ids_N.shape, weight_VD.shape
    stream_ND, out_ND = weight_VD.new_empty((count, width)), weight_VD.new_empty((count, width))
    if not count:
        return stream_ND, out_ND
    first, second = chunks_of(width)
    _kernel[(count,)](
        ids_N.contiguous(),
        weight_VD,
        first_D,
        second_D,
        stream_ND,
        out_ND,
        float(eps),
        table_rows if num_rows is None else num_rows,
        *weight_VD.stride(),
        first_D.stride(0),
        second_D.stride(0),
        WIDTH=width,
        FIRST=first,
        SECOND=second,
        num_warps=num_warps or 4,
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return stream_ND, out_ND
