"""Input builders for matmul: each returns the op's arguments by name."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, in, out)
    "tiny": (5, 64, 96),
    "odd": (7, 45, 211),
    "one_output": (3, 16, 1),
    "router": (9, 6144, 258),
    "inkling_qkvr_local": (64, 6144, 13312),
    "inkling_small_out": (64, 4096, 4096),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`: activations near 1, weights near 1/sqrt(K)."""
    rows, k, out = SHAPES[name]
    device = generator.device
    return {
        "x_NK": torch.randn(rows, k, generator=generator, device=device).to(dtype),
        "weight_MK": (torch.randn(out, k, generator=generator, device=device) / k**0.5).to(dtype),
    }
