"""Input builders for grouped_gemm."""

from itertools import accumulate

import torch
from torch import Tensor

SHAPES = {
    # name: (rows per expert, in, out)
    "tiny": ((3, 0, 7, 1), 64, 48),
    "odd": ((0, 5, 2), 45, 13),
    "inkling_small_w13": ((6,) * 8, 4096, 4096),
    "inkling_w13": ((6,) * 8, 6144, 6144),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name` (without out_dtype); some experts have no rows."""
    rows, k, out = SHAPES[name]
    device = generator.device
    weight = torch.randn(len(rows), out, k, generator=generator, device=device) / k**0.5
    return {
        "x_MK": torch.randn(sum(rows), k, generator=generator, device=device).to(dtype),
        "weight_EFK": weight.to(dtype),
        "offsets_E1": torch.tensor([0, *accumulate(rows)], device=device),
    }
