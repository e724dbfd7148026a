"""Input builders for log_scaling."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, heads, channels, last position)
    "tiny": (9, 4, 16, 40),
    "odd": (5, 3, 7, 12),
    "inkling": (64, 64, 128, 1_048_575),
    "inkling_small": (64, 32, 128, 1_048_575),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name` (without n_floor and alpha): positions up to the last one."""
    rows, heads, channels, last = SHAPES[name]
    device = generator.device
    positions_N = torch.randint(last + 1, (rows,), generator=generator, device=device)
    positions_N[-1] = last
    return {
        "x_NHC": torch.randn(rows, heads, channels, generator=generator, device=device).to(dtype),
        "positions_N": positions_N,
    }
