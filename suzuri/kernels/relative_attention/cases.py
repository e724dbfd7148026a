"""Input builders for relative_attention."""

from itertools import accumulate

import torch
from torch import Tensor

SHAPES = {
    # name: (sequence lengths, heads, KV heads, channels, bias width, reach, window)
    "tiny_global": ((24, 1, 9), 4, 2, 16, 4, 12, None),
    "tiny_local": ((24, 1, 9), 4, 4, 16, 4, 8, 8),
    "odd_global": ((5, 67), 5, 1, 20, 3, 11, None),
    "odd_local": ((5, 67), 3, 3, 12, 3, 7, 7),
    "long_global": ((600,), 2, 1, 8, 3, 100, None),
    "long_local": ((600,), 2, 2, 8, 3, 130, 130),
    "inkling_global": ((1024,), 64, 8, 128, 16, 1024, None),
    "inkling_local": ((1024,), 64, 16, 128, 16, 512, 512),
}


def build(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor | int | None]:
    """Arguments of case `name`: unit-size q and k rows per channel, biases that matter."""
    lengths, heads, kv_heads, channels, width, reach, window = SHAPES[name]
    device, total = generator.device, sum(lengths)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device=device)).to(dtype)

    starts = torch.tensor([0, *accumulate(lengths)], device=device)
    return {
        "q_NHC": normal(total, heads, channels, scale=channels**0.5),
        "k_NUC": normal(total, kv_heads, channels),
        "v_NUC": normal(total, kv_heads, channels),
        "r_NHB": normal(total, heads, width),
        "proj_BE": normal(width, reach),
        "seq_starts_S1": starts,
        "window": window,
    }
