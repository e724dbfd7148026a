"""SwiGLU on a GPU: one pass, gate and up from one contiguous load. Its backward is one pass too,
and so is all that lies between the products of the experts' backward (moe_experts/gradient.py).
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.triton_math import sigmoid, silu, tree_sum

COVERED = (torch.bfloat16, torch.float32)
SLOT_CHUNK, SLOT_ELEMENTS = 128, 1024
"""Of the experts' middle: most hidden units at a time, and rows of a program times those."""


@triton.jit
def _swiglu(x, y, F, x_stride, BF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BF
    at = 2 * first + tl.arange(0, 2 * BF)
    values = tl.load(x + row * x_stride + at, mask=at < 2 * F, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BF, 2)))
    out = first + tl.arange(0, BF)
    hidden = silu(gate) * up
    tl.store(y + row * F + out, hidden.to(y.dtype.element_ty), mask=out < F)


def swiglu(gate_up_NF2: Tensor, out_dtype: torch.dtype, block: int | None = None) -> Tensor:
    shape = (*gate_up_NF2.shape[:-1], gate_up_NF2.shape[-1] // 2)
    hidden = gate_up_NF2.new_empty(shape, dtype=out_dtype)
    if hidden.numel() == 0:
        return hidden
    x = gate_up_NF2.reshape(-1, gate_up_NF2.shape[-1])
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, f = x.shape[0], shape[-1]
    width = block or int(min(1024, max(16, triton.next_power_of_2(f))))
    _swiglu[(rows, triton.cdiv(f, width))](
        x, hidden, f, x.stride(0), BF=width, num_warps=4, enable_fp_fusion=False
    )
    return hidden


@triton.jit
def _swiglu_backward(x, grad, out, F, x_stride, grad_row, grad_column, BF: tl.constexpr):
    """See gradient.py."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BF
    at = 2 * first + tl.arange(0, 2 * BF)
    is_here = at < 2 * F
    values = tl.load(x + row * x_stride + at, mask=is_here, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BF, 2)))
    column = first + tl.arange(0, BF)
    grad_at = grad + row * grad_row + column.to(tl.int64) * grad_column
    given = tl.load(grad_at, mask=column < F, other=0.0).to(tl.float32)
    is_open = sigmoid(gate)
    of_gate = given * up * is_open * (1.0 + gate * (1.0 - is_open))
    both = tl.interleave(of_gate, given * gate * is_open)
    tl.store(out + row * (2 * F) + at, both.to(out.dtype.element_ty), mask=is_here)


def swiglu_backward(gate_up_NF2: Tensor, grad_NF: Tensor, block: int | None = None) -> Tensor:
    """The gradient of gate_up, in its dtype."""
    for tensor in (gate_up_NF2, grad_NF):
        if tensor.dtype not in COVERED:
            raise dispatch.no_kernel(f"the backward of swiglu with {tensor.dtype}", tensor)
    out = gate_up_NF2.new_empty(gate_up_NF2.shape)
    if out.numel() == 0:
        return out
    x, f = gate_up_NF2.reshape(-1, gate_up_NF2.shape[-1]), grad_NF.shape[-1]
    x = x if x.stride(1) == 1 else x.contiguous()
    grad = grad_NF.reshape(-1, f)
    width = block or int(min(1024, max(16, triton.next_power_of_2(f))))
    _swiglu_backward[(x.shape[0], triton.cdiv(f, width))](
        x, grad, out, f, x.stride(0), *grad.stride(), BF=width, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _slots_backward(
    gate_up,
    grad_hidden,
    weights,
    of_slots,
    weighted,
    grad_gate_up,
    num_rows,
    F: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    weight = tl.load(weights + row, mask=valid, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    for first in range(0, F, CHUNK):
        column, doubled = first + tl.arange(0, CHUNK), 2 * first + tl.arange(0, 2 * CHUNK)
        is_here = valid[:, None] & (column < F)[None, :]
        is_pair = valid[:, None] & (doubled < 2 * F)[None, :]
        at, pair_at = row[:, None] * F + column[None, :], row[:, None] * (2 * F) + doubled[None, :]
        values = tl.load(gate_up + pair_at, mask=is_pair, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(values, (ROWS, CHUNK, 2)))
        given = tl.load(grad_hidden + at, mask=is_here, other=0.0).to(tl.float32)
        # As the forward has them, and rounded as there: to the dtype of the products.
        activated = silu(gate)
        hidden = (activated * up).to(grad_gate_up.dtype.element_ty).to(tl.float32)
        total += given * hidden
        tl.store(weighted + at, hidden * weight, mask=is_here)
        is_open = sigmoid(gate)
        given = given * weight
        of_gate = given * up * (is_open * (1.0 + gate * (1.0 - is_open)))
        both = tl.reshape(tl.join(of_gate, given * activated), (ROWS, 2 * CHUNK))
        tl.store(grad_gate_up + pair_at, both.to(grad_gate_up.dtype.element_ty), mask=is_pair)
    tl.store(of_slots + row, tree_sum(total), mask=valid)


def slots_backward(
    gate_up_MF2: Tensor,
    grad_hidden_MF: Tensor,
    weights_M: Tensor,
    dtype: torch.dtype,
    *,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """`middle` of moe_experts/gradient.py; the gradient of gate and up comes in `dtype`."""
    for given in (gate_up_MF2.dtype, grad_hidden_MF.dtype, weights_M.dtype, dtype):
        if given not in COVERED:
            raise dispatch.no_kernel(f"the backward of experts with {given}", gate_up_MF2)
    m, f = grad_hidden_MF.shape
    of_slots_M = gate_up_MF2.new_zeros(m, dtype=torch.float32)
    weighted_MF = gate_up_MF2.new_empty((m, f), dtype=torch.float32)
    grad_gate_up_MF2 = gate_up_MF2.new_empty((m, 2 * f), dtype=dtype)
    if not weighted_MF.numel():
        return of_slots_M, weighted_MF, grad_gate_up_MF2
    chunk = min(triton.next_power_of_2(f), SLOT_CHUNK)
    rows = min(128, SLOT_ELEMENTS // chunk)
    _slots_backward[(triton.cdiv(m, rows),)](
        gate_up_MF2.contiguous(),
        grad_hidden_MF.contiguous(),
        weights_M.contiguous(),
        of_slots_M,
        weighted_MF,
        grad_gate_up_MF2,
        m,
        F=f,
        CHUNK=chunk,
        ROWS=rows,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return of_slots_M, weighted_MF, grad_gate_up_MF2
