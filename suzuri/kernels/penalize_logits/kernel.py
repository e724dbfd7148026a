"""All three penalties in one launch, an id at a time; each operation rounded by itself."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

BLOCK = 2048
"""Ids of one program."""


@triton.jit
def _kernel(
    logits,
    prompt,
    output,
    slots,
    repetition,
    frequency,
    presence,
    out,
    row_stride,
    column_stride,
    prompt_stride,
    output_stride,
    vocabulary,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    repeated, often, present = (
        tl.load(repetition + row),
        tl.load(frequency + row),
        tl.load(presence + row),
    )
    v = tl.program_id(1) * IDS + tl.arange(0, IDS)
    inside = v < vocabulary
    x = tl.load(logits + row * row_stride + v * column_stride, mask=inside).to(tl.float32)
    count = tl.load(output + slot * output_stride + v, mask=inside, other=0)
    in_prompt = tl.load(prompt + slot * prompt_stride + v, mask=inside, other=0) != 0
    seen = in_prompt | (count > 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repeated), x * repeated), x)
    x = x - often * count.to(tl.float32)
    x = tl.where(count > 0, x - present, x)
    tl.store(out + row * vocabulary + v, x, mask=inside)


def penalize_logits(
    logits_NV: Tensor,
    prompt_LV: Tensor,
    output_LV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = 4,
) -> Tensor:
    if logits_NV.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"penalize_logits of {logits_NV.dtype}", logits_NV)
    num_rows, vocabulary = logits_NV.shape
    if prompt_LV.stride(1) != 1 or output_LV.stride(1) != 1:
        raise dispatch.no_kernel("penalize_logits with strided tables", logits_NV)
    out_NV = torch.empty((num_rows, vocabulary), dtype=torch.float32, device=logits_NV.device)
    if not num_rows or not vocabulary:
        return out_NV
    _kernel[(num_rows, triton.cdiv(vocabulary, block))](
        logits_NV,
        prompt_LV,
        output_LV,
        slots_N.contiguous(),
        repetition_N.to(torch.float32).contiguous(),
        frequency_N.to(torch.float32).contiguous(),
        presence_N.to(torch.float32).contiguous(),
        out_NV,
        *logits_NV.stride(),
        prompt_LV.stride(0),
        output_LV.stride(0),
        vocabulary,
        IDS=block,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out_NV
