"""Input builders for sample_tokens."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, vocabulary)
    "tiny": (9, 301),
    "odd": (5, 37),
    "inkling": (8, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`: greedy and sampled rows mixed."""
    rows, vocabulary = SHAPES[name]
    device = generator.device
    temperature = torch.rand(rows, generator=generator, device=device) * 1.5
    temperature[0] = 0.0
    return {
        "logits_NV": torch.randn(rows, vocabulary, generator=generator, device=device).to(dtype),
        "temperature_N": temperature,
        "seeds_N": torch.randint(2**62, (rows,), generator=generator, device=device),
        "positions_N": torch.randint(2**20, (rows,), generator=generator, device=device),
        "sample_index_N": torch.randint(16, (rows,), generator=generator, device=device),
    }
