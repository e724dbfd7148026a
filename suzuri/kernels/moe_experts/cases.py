"""Input builders for moe_experts."""

from typing import Any

import torch
from torch import Tensor

SHAPES = {
    # name: (tokens, width, expert width, routed experts, shared ones, k)
    "tiny": (9, 64, 32, 8, 2, 2),
    "odd": (5, 45, 13, 7, 1, 3),
    "none_shared": (6, 16, 8, 3, 0, 1),
    "inkling_small_16_experts": (16, 4096, 2048, 14, 2, 6),
    "inkling_16_experts": (16, 6144, 3072, 14, 2, 6),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of case `name`: distinct ascending experts per token."""
    tokens, width, hidden, routed, shared, k = SHAPES[name]
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    draw = torch.rand(tokens, routed, generator=generator, device=device)
    return {
        "x_ND": normal(tokens, width).to(dtype),
        "experts_NK": draw.argsort(-1)[:, :k].sort(-1).values,
        "weights_NJ": torch.rand(tokens, k + shared, generator=generator, device=device).to(wide),
        "gate_up_EFD": (normal(routed + shared, 2 * hidden, width) / width**0.5).to(dtype),
        "down_EDF": (normal(routed + shared, width, hidden) / hidden**0.5).to(dtype),
    }
