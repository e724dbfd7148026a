"""Input builders for short_conv."""

from itertools import accumulate

import torch
from torch import Tensor

SHAPES = {
    # name: (sequence lengths, channels, taps)
    "tiny": ((7, 1, 3, 12), 24, 4),
    "odd": ((2, 5), 13, 3),
    "one_tap": ((3, 4), 8, 1),
    "five_taps": ((6, 2, 9), 10, 5),
    "inkling": ((32, 32), 6144, 4),
    "inkling_kv_local": ((64,), 4096, 4),
    "inkling_small": ((32, 32), 4096, 4),
    "inkling_small_kv_local": ((64,), 2048, 4),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`, without state: fresh sequences."""
    lengths, channels, taps = SHAPES[name]
    device = generator.device
    lengths_S = torch.tensor(lengths, device=device)
    total = sum(lengths)
    seq_ids_N = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths_S)
    starts_S1 = torch.tensor([0, *accumulate(lengths)], device=device)
    return {
        "x_NC": torch.randn(total, channels, generator=generator, device=device).to(dtype),
        "weight_CK": torch.randn(channels, taps, generator=generator, device=device).to(dtype),
        "positions_N": torch.arange(total, device=device) - starts_S1[seq_ids_N],
        "seq_ids_N": seq_ids_N,
        "seq_starts_S1": starts_S1,
    }
