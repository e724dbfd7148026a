"""Dequantising in one launch, by bits: it needs no hardware that knows these formats."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.nvfp4.reference import BLOCK

BYTES_PER_SCALE = tl.constexpr(BLOCK // 2)
BYTES = 1024
"""Of codes, of one program: two values each."""


@triton.jit
def _e2m1(code):
    """The value of four bits in fp32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    kind = code & 7
    # Twice the magnitude is an integer: 0..3 below 2, then 2 or 3 times a power of two.
    twice = tl.where(kind < 4, kind, (2 + (kind & 1)) << (tl.maximum(kind >> 1, 1) - 1))
    return twice.to(tl.float32) * tl.where(code > 7, -0.5, 0.5)  # 0 keeps its sign


@triton.jit
def _e4m3(code):
    """The value of eight bits in fp32."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where((code & 127) == 127, float("nan"), magnitude)
    return magnitude * tl.where(code > 127, -1.0, 1.0)


@triton.jit
def _dequantize_kernel(
    codes,
    block_scales,
    global_scales,
    out,
    rows_per_expert,
    bytes_per_row,
    NUM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * NUM + tl.arange(0, NUM)
    inside = column < bytes_per_row
    pair = tl.load(codes + row * bytes_per_row + column, mask=inside, other=0).to(tl.int32)
    scale_at = row * (bytes_per_row // BYTES_PER_SCALE) + column // BYTES_PER_SCALE
    scale = _e4m3(tl.load(block_scales + scale_at, mask=inside, other=0).to(tl.int32))
    whole = tl.load(global_scales + row // rows_per_expert)
    # e2m1 * block scale is exact; the second product is rounded to fp32, then to bf16.
    even = (_e2m1(pair & 15) * scale * whole).to(tl.bfloat16)
    odd = (_e2m1(pair >> 4) * scale * whole).to(tl.bfloat16)
    at = out + row * (2 * bytes_per_row) + tl.program_id(1) * (2 * NUM) + tl.arange(0, 2 * NUM)
    is_kept = tl.program_id(1) * (2 * NUM) + tl.arange(0, 2 * NUM) < 2 * bytes_per_row
    tl.store(at, tl.interleave(even, odd).to(out.dtype.element_ty), mask=is_kept)


def dequantize(
    codes: Tensor,
    block_scales: Tensor,
    global_scales: Tensor,
    out_dtype: torch.dtype,
    *,
    block: int = BYTES,
    num_warps: int = 4,
) -> Tensor:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"nvfp4.dequantize to {out_dtype}", codes)
    experts, rows, num_bytes = codes.shape
    out_ENK = torch.empty((experts, rows, 2 * num_bytes), dtype=out_dtype, device=codes.device)
    if not out_ENK.numel():
        return out_ENK
    width = min(block, triton.next_power_of_2(num_bytes))
    _dequantize_kernel[(experts * rows, triton.cdiv(num_bytes, width))](
        codes.contiguous(),
        block_scales.contiguous().view(torch.uint8),
        global_scales.to(torch.float32).contiguous(),
        out_ENK,
        rows,
        num_bytes,
        NUM=width,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out_ENK
