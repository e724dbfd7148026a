"""The chunked head on a GPU: a run of vocabulary chunks at a time, logits in fp32, their stats, and
one fold at the end. The pieces are those of matmul and log_softmax.
"""

import torch
from torch import Tensor

from suzuri.kernels.log_softmax.kernel import CHUNK, FOLD_ROWS, Stats
from suzuri.kernels.matmul import kernel as matmul

MOST_CHUNKS = 8
MOST_LOGITS = 1 << 26
"""Logits that exist at one time: 256 MiB."""


def chunks_per_run(rows: int) -> int:
    """Whole chunks whose logits of `rows` fit MOST_LOGITS, at least one and at most MOST_CHUNKS."""
    return max(1, min(MOST_CHUNKS, MOST_LOGITS // (rows * CHUNK)))


def token_logprobs(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    run: int | None = None,
) -> Tensor:
    n, v = h_ND.shape[0], unembed_VD.shape[0]
    if n == 0:
        return h_ND.new_empty(0, dtype=torch.float32)
    stats = Stats(h_ND, n, v)
    if temperature_N is not None:
        temperature_N = temperature_N.to(torch.float32).contiguous()
    targets_N = targets_N.contiguous()
    run = run or chunks_per_run(n)
    for first in range(0, stats.num_chunks, run):
        rows_BD = unembed_VD[first * CHUNK : (first + run) * CHUNK]
        stats.add(
            matmul.matmul(h_ND, rows_BD, 1.0, torch.float32),
            first,
            scale=scale,
            temperature_N=temperature_N,
            targets_N=targets_N,
        )
    return stats.folded(targeted=True, rows=FOLD_ROWS)
