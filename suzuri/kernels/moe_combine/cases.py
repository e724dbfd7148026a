"""Input builders for moe_combine."""

import torch
from torch import Tensor

SHAPES = {
    # name: (tokens, width, slots)
    "tiny": (9, 64, 4),
    "odd": (5, 13, 3),
    "one_slot": (4, 8, 1),
    "inkling": (64, 6144, 8),
    "inkling_small": (64, 4096, 8),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Slot outputs, an order and weights for case `name` (the test makes the Permutation)."""
    tokens, width, slots = SHAPES[name]
    device = generator.device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = tokens * slots
    return {
        "y_MD": torch.randn(rows, width, generator=generator, device=device).to(dtype),
        "order_M": torch.randperm(rows, generator=generator, device=device),
        "weights_NJ": torch.rand(tokens, slots, generator=generator, device=device).to(wide),
    }
