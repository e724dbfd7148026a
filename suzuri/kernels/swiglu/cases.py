"""Input builders for swiglu."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, hidden)
    "tiny": (9, 32),
    "odd": (5, 13),
    "inkling_expert": (64, 3072),
    "inkling_dense": (16, 24576),
    "inkling_small_expert": (64, 2048),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name` (without out_dtype), some gates far out on both sides."""
    rows, hidden = SHAPES[name]
    x = 3 * torch.randn(rows, 2 * hidden, generator=generator, device=generator.device)
    x[0, 0], x[-1, 0] = -110.0, 110.0
    return {"gate_up_NF2": x.to(dtype)}
