"""Input builders for embedding_sum."""

import torch
from torch import Tensor

SHAPES = {
    # name: (frames, bins, levels, width)
    "tiny": (7, 12, 8, 24),
    "odd": (3, 5, 3, 31),
    "inkling": (40, 80, 16, 6144),
    "inkling_small": (40, 80, 16, 4096),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`: row b*levels + level per bin, as the audio tower asks."""
    frames, bins, levels, width = SHAPES[name]
    device = generator.device
    level_NB = torch.randint(levels, (frames, bins), generator=generator, device=device)
    return {
        "ids_NB": level_NB + levels * torch.arange(bins, device=device),
        "weight_VD": torch.randn(bins * levels, width, generator=generator, device=device).to(
            dtype
        ),
    }
