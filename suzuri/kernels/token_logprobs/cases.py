"""Input builders for token_logprobs."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, width, vocabulary)
    "tiny": (9, 64, 301),
    "odd": (5, 45, 4099),
    "inkling": (4, 6144, 200058),
    "inkling_small": (4, 4096, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor | float]:
    """Arguments of case `name`; the targets include the first and the last id."""
    rows, width, vocabulary = SHAPES[name]
    device = generator.device
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    targets[0], targets[-1] = 0, vocabulary - 1
    return {
        "h_ND": torch.randn(rows, width, generator=generator, device=device).to(dtype),
        "unembed_VD": torch.randn(vocabulary, width, generator=generator, device=device).to(dtype),
        "targets_N": targets,
        "scale": 0.25,
    }
