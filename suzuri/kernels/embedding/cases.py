"""Input builders for embedding."""

import torch
from torch import Tensor

SHAPES = {
    # name: (tokens, vocabulary, width)
    "tiny": (9, 40, 16),
    "repeated": (70, 5, 33),
    "inkling": (64, 201024, 6144),
    "inkling_small": (64, 201024, 4096),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`; ids repeat, so that the gradient has sums to take."""
    tokens, vocabulary, width = SHAPES[name]
    device = generator.device
    return {
        "ids_N": torch.randint(vocabulary, (tokens,), generator=generator, device=device),
        "weight_VD": torch.randn(vocabulary, width, generator=generator, device=device).to(dtype),
    }
