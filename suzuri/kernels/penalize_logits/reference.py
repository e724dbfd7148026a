"""The three penalties as the contract states them."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def penalize_logits(
    logits_NV: Tensor,
    prompt_LV: Tensor,
    output_LV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    x_NV = exact.widen(logits_NV)
    repetition_N1, frequency_N1, presence_N1 = (
        penalty_N.to(x_NV.dtype)[:, None] for penalty_N in (repetition_N, frequency_N, presence_N)
    )
    count_NV = output_LV[slots_N]
    in_output_NV = count_NV > 0
    seen_NV = prompt_LV[slots_N] | in_output_NV
    repeated_NV = torch.where(x_NV > 0, x_NV / repetition_N1, x_NV * repetition_N1)
    x_NV = torch.where(seen_NV, repeated_NV, x_NV)
    x_NV = x_NV - frequency_N1 * count_NV
    return torch.where(in_output_NV, x_NV - presence_N1, x_NV)
