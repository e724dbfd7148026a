"""Input builders for moe_permute."""

import torch
from torch import Tensor

SHAPES = {
    # name: (tokens, width, experts, slots)
    "tiny": (9, 16, 10, 4),
    "odd": (5, 7, 8, 3),
    "inkling": (64, 6144, 258, 8),
    "inkling_small": (64, 4096, 258, 8),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor | int]:
    """Arguments of case `name`: distinct experts per token, the first and the last one unused."""
    tokens, width, experts, slots = SHAPES[name]
    device = generator.device
    draw = torch.rand(tokens, experts, generator=generator, device=device)
    draw[:, [0, -1]] = 2.0
    return {
        "x_ND": torch.randn(tokens, width, generator=generator, device=device).to(dtype),
        "experts_NJ": draw.argsort(-1)[:, :slots].sort(-1).values,
        "num_experts": experts,
    }
