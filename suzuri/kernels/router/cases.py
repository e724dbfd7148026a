"""Input builders for router."""

import torch
from torch import Tensor

SHAPES = {
    # name: (tokens, width, routed, shared, k)
    "tiny": (9, 64, 8, 2, 2),
    "odd": (5, 45, 7, 1, 3),
    "all_chosen": (4, 16, 3, 0, 3),
    "inkling": (64, 6144, 256, 2, 6),
    "inkling_small": (64, 4096, 256, 2, 6),
}


def build(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor | int | float]:
    """Arguments of case `name`."""
    tokens, width, routed, shared, k = SHAPES[name]
    device = generator.device
    weight = torch.randn(routed + shared, width, generator=generator, device=device) / width**0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x_ND": torch.randn(tokens, width, generator=generator, device=device).to(dtype),
        "weight_ED": weight.to(dtype),
        "bias_R": 0.1 * torch.randn(routed, generator=generator, device=device).to(wide),
        "global_scale_1": torch.tensor([1.3], device=device, dtype=wide),
        "num_experts_per_token": k,
        "route_scale": 8.0,
    }
