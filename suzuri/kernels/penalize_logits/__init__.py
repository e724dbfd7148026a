"""Repetition, frequency and presence penalties, from tables of what a sequence has seen."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.penalize_logits import reference


def penalize_logits(
    logits_NV: Tensor,
    prompt_LV: Tensor,
    output_LV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """The logits [N, V] after the penalties, in their (at least fp32) dtype; no gradients.

    Row n's sequence keeps its counts in row slots_N[n] (int64 in [0, L)) of two tables: prompt_LV
    bool, whether id v is in the prompt, and output_LV int32, how often it was generated.
    repetition_N, frequency_N, presence_N [N] fp32. In this order, each operation rounded:
    1. where v is in prompt or output, a positive logit is divided by repetition, any other
       multiplied by it (Keskar et al., CTRL, 2019);
    2. frequency * output is subtracted;
    3. where v is in the output, presence is subtracted.
    Every value is a function of its own logit and counts. With 1, 0 and 0 no bit changes.
    """
    if (prompt_LV.dtype, output_LV.dtype) != (torch.bool, torch.int32):
        raise ValueError(
            f"penalize_logits: prompt is {prompt_LV.dtype}, output is {output_LV.dtype}; they must "
            "be torch.bool and torch.int32"
        )
    if dispatch.use_reference(logits_NV):
        return reference.penalize_logits(
            logits_NV, prompt_LV, output_LV, slots_N, repetition_N, frequency_N, presence_N
        )
    if logits_NV.device.type != "cuda":
        raise dispatch.no_kernel("penalize_logits", logits_NV)
    from suzuri.kernels.penalize_logits import kernel

    return kernel.penalize_logits(
        logits_NV, prompt_LV, output_LV, slots_N, repetition_N, frequency_N, presence_N
    )
