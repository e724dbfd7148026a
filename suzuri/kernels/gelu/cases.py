"""Input builders for gelu."""

import torch
from torch import Tensor

SHAPES = {"tiny": (9, 64), "odd": (5, 37), "inkling_vision": (25, 4800)}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`."""
    x = 2 * torch.randn(*SHAPES[name], generator=generator, device=generator.device)
    return {"x": x.to(dtype)}
