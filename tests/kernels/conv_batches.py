"""Batches in which sequences go on from a ring: of few rows each, of many, and both."""

from itertools import accumulate

import torch
from torch import Tensor

from tests.kernels.compare import Arguments, generator

BATCHES = {
    # name: (rows of each sequence, position of its first row)
    "decode": ([1, 1, 1, 1], [0, 2, 7, 40]),
    "verify": ([5, 5, 5], [0, 3, 11]),
    "ragged": ([9, 0, 1, 2, 14, 1], [0, 5, 6, 1, 3, 0]),
    "prefill": ([40, 3], [0, 2]),
}


def batch(
    name: str, device: str, dtype: torch.dtype, *, taps: int, channels: int = 21, seed: int = 2
) -> Arguments:
    lengths, firsts = BATCHES[name]
    g = generator(seed, device)

    def whole(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return {
        "x_NC": torch.randn(sum(lengths), channels, generator=g, device=device).to(dtype),
        "weight_CK": torch.randn(channels, taps, generator=g, device=device).to(dtype),
        "positions_N": whole(
            [p for n, a in zip(lengths, firsts, strict=True) for p in range(a, a + n)]
        ),
        "seq_ids_N": whole([s for s, n in enumerate(lengths) for _ in range(n)]),
        "seq_starts_S1": whole([0, *accumulate(lengths)]),
    }
