"""GELU in one launch, an element at a time."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

BLOCK = 2048
"""Elements of one program."""


@triton.jit
def _kernel(x, out, count, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    wide = tl.load(x + at, mask=inside).to(tl.float32)
    y = wide * (1 + tl.erf(wide * 0.7071067811865476)) * 0.5
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def gelu(x: Tensor, *, block: int = BLOCK, num_warps: int = 4) -> Tensor:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"gelu of {x.dtype}", x)
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _kernel[(triton.cdiv(x.numel(), block),)](
            x, out, x.numel(), ELEMENTS=block, num_warps=num_warps, enable_fp_fusion=False
        )
    return out
