"""Rows times tau in one launch; tau is computed by every program from its row's position."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

BLOCK = 1024
"""Columns (heads times channels) of one program."""


@triton.jit
def _kernel(
    x,
    positions,
    out,
    n_floor,
    alpha,
    row_stride,
    head_stride,
    channel_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ratio = tl.div_rn((tl.load(positions + row) + 1).to(tl.float32), n_floor)
    tau = 1 + alpha * tl.log(tl.maximum(ratio, 1.0))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head, channel = column // CHANNELS, column % CHANNELS
    inside = column < WIDTH
    at = row * row_stride + head * head_stride + channel * channel_stride
    y = tl.load(x + at, mask=inside).to(tl.float32) * tau
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)


def log_scaling(
    x_NHC: Tensor,
    positions_N: Tensor,
    n_floor: float,
    alpha: float,
    *,
    block: int = BLOCK,
    num_warps: int = 4,
) -> Tensor:
    if x_NHC.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"log_scaling of {x_NHC.dtype}", x_NHC)
    num_rows, heads, channels = x_NHC.shape
    width = heads * channels
    out_NHC = torch.empty((num_rows, heads, channels), dtype=x_NHC.dtype, device=x_NHC.device)
    if not num_rows or not width:
        return out_NHC
    columns = min(triton.next_power_of_2(width), block)
    _kernel[(num_rows, triton.cdiv(width, columns))](
        x_NHC,
        positions_N.contiguous(),
        out_NHC,
        float(n_floor),
        float(alpha),
        *x_NHC.stride(),
        WIDTH=width,
        CHANNELS=channels,
        COLUMNS=columns,
        num_warps=num_warps,
        enable_fp_fusion=False,  # tau is rounded after its product and after its sum
    )
    return out_NHC
