"""The chunked head on a GPU: a run of vocabulary chunks at a time, logits in fp32, their stats, and
one fold at the end. The pieces are those of matmul and log_softmax.
"""

import torch
from torch import Tensor

from suzuri.kernels.log_softmax.kernel import CHUNK, Stats
from suzuri.kernels.matmul import kernel as matmul

MOST_CHUNKS = 8
MOST_LOGITS = 1 << 26
"""Logits that exist at one time: 256 MiB."""


def chunks_per_run(rows: int) -> int:
    """Whole chunks whose logits of `rows` fit MOST_LOGITS, at least one and at most MOST_CHUNKS."""
    return max(1, min(MOST_CHUNKS, MOST_LOGITS // (rows * CHUNK)))


def statistics(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_NK: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    with_entropy: bool,
    run: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    (n, num_targets), v = targets_NK.shape, unembed_VD.shape[0]
    stats = Stats(h_ND, n, v, num_targets, with_entropy)
    if n == 0:
        none = stats.most_NB.new_empty(0)
        return stats.target_NK, none, none if with_entropy else None
    if temperature_N is not None:
        temperature_N = temperature_N.to(torch.float32).contiguous()
    targets_NK = targets_NK.contiguous()
    run = run or chunks_per_run(n)
    for first in range(0, stats.num_chunks, run):
        rows_BD = unembed_VD[first * CHUNK : (first + run) * CHUNK]
        stats.add(
            matmul.matmul(h_ND, rows_BD, 1.0, torch.float32),
            first,
            scale=scale,
            temperature_N=temperature_N,
            targets_NK=targets_NK,
        )
    norm_N, entropy_N = stats.folded()
    return stats.target_NK - norm_N[:, None], norm_N, entropy_N
