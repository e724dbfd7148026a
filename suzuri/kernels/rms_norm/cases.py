"""Input builders for rms_norm."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, width)
    "tiny": (9, 64),
    "odd": (5, 45),
    "one": (3, 1),
    "head": (24, 128),
    "inkling": (64, 6144),
    "inkling_small": (64, 4096),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name` (without eps): rows of very different size, weights around 1."""
    rows, width = SHAPES[name]
    device = generator.device
    scale_N1 = torch.exp(2 * torch.randn(rows, 1, generator=generator, device=device))
    x_ND = torch.randn(rows, width, generator=generator, device=device) * scale_N1
    weight_D = 1 + 0.3 * torch.randn(width, generator=generator, device=device)
    return {"x_ND": x_ND.to(dtype), "weight_D": weight_D.to(dtype)}
