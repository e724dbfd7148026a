"""Input builders for nvfp4."""

import torch
from torch import Tensor

SHAPES = {
    # name: (experts, rows, columns)
    "tiny": (3, 6, 32),
    "odd": (1, 5, 48),
    "one_block": (2, 1, 16),
    "inkling_small_expert": (1, 4096, 4096),
    "inkling_expert": (1, 6144, 6144),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """The argument of quantize for case `name`: normal, a block of zeros, one far outlier."""
    shape = SHAPES[name]
    weight = 0.02 * torch.randn(*shape, generator=generator, device=generator.device)
    weight[0, -1, -16:] = 0
    weight[-1, 0, 0] = 0.7
    return {"weight_ENK": weight.to(dtype)}
