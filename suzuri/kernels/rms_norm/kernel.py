"""RMSNorm in one launch: a program norms a few whole rows. Its backward in one more than that: a
program has some whole rows, and writes their part of the weight's gradient beside theirs.
"""

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
BACKWARD_CHUNK, BACKWARD_ROWS, BACKWARD_ELEMENTS = 128, 16, 2048
"""Of the backward: most columns at a time, fewest rows of a program, rows times those columns. The
rows, not the launch, decide how many parts the weight's gradient is summed from."""
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


@triton.jit
def _load_all(
    x,
    grad,
    weight,
    x_start,
    grad_start,
    place,
    valid,
    x_column,
    grad_column,
    weight_stride,
    WIDTH: tl.constexpr,
):
    """x, grad [R, C] and weight [C] at the columns `place`, in fp32, zero outside."""
    inside = place < WIDTH
    is_here = valid[:, None] & inside[None, :]
    wide = place.to(tl.int64)
    value = tl.load(x + x_start[:, None] + (wide * x_column)[None, :], mask=is_here, other=0.0)
    grad_at = grad + grad_start[:, None] + (wide * grad_column)[None, :]
    given = tl.load(grad_at, mask=is_here, other=0.0)
    factor = tl.load(weight + wide * weight_stride, mask=inside, other=0.0)
    return value.to(tl.float32), given.to(tl.float32), factor.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    x,
    grad,
    weight,
    grad_x,
    parts,
    eps,
    num_rows,
    inner_rows,
    x_outer,
    x_inner,
    x_column,
    grad_outer,
    grad_inner,
    grad_column,
    weight_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
):
    """See gradient.py. Two passes over the rows; a row has the bits of its numbers alone."""
    block = tl.program_id(0).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    outer, inner = row // inner_rows, row % inner_rows
    x_start = outer * x_outer + inner * x_inner
    grad_start = outer * grad_outer + inner * grad_inner
    column = tl.arange(0, CHUNK)
    squares = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    products = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    for first in range(0, WIDTH, CHUNK):
        value, given, factor = _load_all(
            x,
            grad,
            weight,
            x_start,
            grad_start,
            first + column,
            valid,
            x_column,
            grad_column,
            weight_stride,
            WIDTH,
        )
        squares += value * value
        products += given * factor[None, :] * value
    scale = tl.rsqrt(tl.div_rn(tree_sum(squares), WIDTH * 1.0) + eps)
    scale = tl.where(valid, scale, 0.0)[:, None]  # of no row it may be infinite
    pull = tl.div_rn(tree_sum(products), WIDTH * 1.0)[:, None] * scale * scale
    for first in range(0, WIDTH, CHUNK):
        place = first + column
        value, given, factor = _load_all(
            x,
            grad,
            weight,
            x_start,
            grad_start,
            place,
            valid,
            x_column,
            grad_column,
            weight_stride,
            WIDTH,
        )
        inside = place < WIDTH
        if NEEDS_X:
            y = (given * factor[None, :] - value * pull) * scale
            at = row[:, None] * WIDTH + place[None, :]
            is_here = valid[:, None] & inside[None, :]
            tl.store(grad_x + at, y.to(grad_x.dtype.element_ty), mask=is_here)
        if NEEDS_WEIGHT:
            part = tree_sum(tl.trans(given * (value * scale)))
            tl.store(parts + block * WIDTH + place, part, mask=inside)


def _rows_of(x_ND: Tensor) -> Tensor:
    """[outer, inner, D]: rows of one or two leading dims where they lie, whatever the strides."""
    rows = x_ND if x_ND.dim() in (2, 3) else x_ND.reshape(-1, x_ND.shape[-1])
    return rows[:, None] if rows.dim() == 2 else rows


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
    rows = _rows_of(x_ND)
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


def rms_norm_backward(
    x_ND: Tensor,
    weight_D: Tensor,
    eps: float,
    grad_ND: Tensor,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
    num_warps: int = 4,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x (in its dtype) and of the weight (fp32 [D]), None where not needed."""
    for tensor in (x_ND, weight_D, grad_ND):
        if tensor.dtype not in COVERED:
            raise dispatch.no_kernel(f"the backward of rms_norm with {tensor.dtype}", x_ND)
    width = x_ND.shape[-1]
    grad_x = x_ND.new_empty(x_ND.shape) if needs_x else None
    if not x_ND.numel() or not (needs_x or needs_weight):
        none = x_ND.new_zeros(width, dtype=torch.float32) if needs_weight else None
        return grad_x, none
    rows, grads = _rows_of(x_ND), _rows_of(grad_ND)
    num_rows, inner_rows = rows.shape[0] * rows.shape[1], rows.shape[1]
    chunk = min(triton.next_power_of_2(width), BACKWARD_CHUNK)
    # At most 128 rows: of rows of a few numbers a tile is not full.
    rows_per_program = min(128, max(BACKWARD_ROWS, BACKWARD_ELEMENTS // chunk))
    blocks = triton.cdiv(num_rows, rows_per_program)
    parts = rows.new_empty((blocks, width), dtype=torch.float32) if needs_weight else None
    _backward[(blocks,)](
        rows,
        grads,
        weight_D,
        rows if grad_x is None else grad_x,  # what is not needed is not looked at
        rows if parts is None else parts,
        float(eps),
        num_rows,
        inner_rows,
        *rows.stride(),
        *grads.stride(),
        weight_D.stride(0),
        WIDTH=width,
        CHUNK=chunk,
        ROWS=rows_per_program,
        NEEDS_X=needs_x,
        NEEDS_WEIGHT=needs_weight,
        num_warps=num_warps,
        enable_fp_fusion=False,  # as in the forward: each product is rounded
    )
    return grad_x, None if parts is None else parts.sum(0)
