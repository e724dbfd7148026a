"""Input builders for draw_tokens."""

from typing import Any

import torch

from suzuri.kernels.draw_tokens.draws import Draws

SHAPES = {
    # name: (rows, width, vocabulary)
    "tiny": (9, 64, 301),
    "odd": (5, 45, 4099),
    "inkling": (64, 6144, 200058),
    "inkling_one": (1, 6144, 200058),
    "inkling_small": (64, 4096, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of case `name`: greedy and sampled rows mixed, each with some of its log-probs."""
    rows, width, vocabulary = SHAPES[name]
    device = generator.device

    def whole(limit: int) -> torch.Tensor:
        return torch.randint(limit, (rows,), generator=generator, device=device)

    temperature = torch.rand(rows, generator=generator, device=device) * 1.5 + 0.1
    temperature[rows // 2] = 0.0
    # Logits near 1: the noise decides among many ids.
    unembed = torch.randn(vocabulary, width, generator=generator, device=device) / width**0.5
    return {
        "h_ND": torch.randn(rows, width, generator=generator, device=device).to(dtype),
        "unembed_VD": unembed.to(dtype),
        "draws": Draws(temperature, whole(2**62), whole(2**20), whole(16)),
        "wants_N": torch.arange(rows, device=device) % 4,
        "scale": 0.75,
    }
