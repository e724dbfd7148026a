"""Input builders for philox."""

import torch
from torch import Tensor

SHAPES = {"tiny": (9, 75), "odd": (3, 7), "inkling": (64, 50015)}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name` (dtype is ignored): rows of seeds and positions, columns of ids."""
    rows, columns = SHAPES[name]
    device = generator.device

    def words(*shape: int) -> Tensor:
        return torch.randint(2**32, shape, generator=generator, device=device)

    return {
        "seed": words(rows, 1) << 31,
        "c0": words(rows, 1),
        "c1": torch.arange(columns, device=device)[None],
        "c2": words(1, 1),
        "c3": words(rows, 1),
    }
