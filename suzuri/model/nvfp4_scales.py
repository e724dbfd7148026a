"""Global scales of NVFP4 as multipliers (ModelOpt, and ours) and as divisors (compressed-tensors).

A divisor is read as the fp32 number next to its inverse. Not every multiplier is such a number, so
writing looks for a divisor near the inverse that leaves every bf16 value as it is.
"""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, nvfp4
from suzuri.kernels.nvfp4 import Nvfp4

NEIGHBOURS = (0, 1, -1)
"""Steps of one fp32 number to try around the inverse; none further off was ever of use."""


def multiplier_of(divisors: Tensor) -> Tensor:
    """fp32 [R] -> fp32 [R]."""
    return 1 / divisors


def divisor_of(multiplier: Tensor, where: str) -> Tensor:
    """fp32 [1] -> fp32 [1] with the same bf16 value for every code and block scale.

    Raises ValueError, naming `where`, when there is none.
    """
    wanted = _all_values(multiplier)
    nearest = 1 / multiplier
    for step in NEIGHBOURS:
        divisor = (nearest.view(torch.int32) + step).view(torch.float32)
        if torch.equal(_all_values(multiplier_of(divisor)), wanted):
            return divisor
    raise ValueError(
        f"{where}: no divisor gives the values of the scale {multiplier.item()!r} exactly; keep "
        "ModelOpt's names (--names modelopt), under which the scale itself is stored"
    )


def _all_values(multiplier: Tensor) -> Tensor:
    """The bf16 value of every code under every finite block scale."""
    scale_bytes = torch.arange(0x7F, dtype=torch.uint8)
    block_scales = scale_bytes.view(torch.float8_e4m3fn).reshape(1, -1, 1)
    codes = torch.arange(0, 256, 33, dtype=torch.uint8)[:8].expand(1, 0x7F, 8)
    with dispatch.force("reference"):
        return nvfp4.dequantize(
            Nvfp4(codes=codes, block_scales=block_scales, global_scales=multiplier)
        )
