"""SwiGLU on a GPU: one pass, gate and up from one contiguous load."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.triton_math import silu


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
