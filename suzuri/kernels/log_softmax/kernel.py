"""The chunked normaliser on a GPU (docs/exactness.md rule 7); `add_stats` and `normalizer` are also
those of token_logprobs, so that both give one log-prob.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.triton_math import EMPTY_MAX, chunk_stats, fold_chunk

CHUNK = 2048
FOLD_ROWS = 32


@triton.jit(do_not_specialize=["first_chunk"])
def _stats(
    logits,
    most,
    total,
    temperature,
    targets,
    target_logit,
    V,
    row_stride,
    first_chunk,
    num_chunks,
    scale,
    SCALED: tl.constexpr,
    TEMPERED: tl.constexpr,
    TARGETED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk of these logits): max and sum into column first_chunk + chunk of the
    stats; the logit of a target that lies in the chunk into target_logit."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
    if SCALED:
        x = x * scale
    if TEMPERED:
        x = tl.div_rn(x, tl.broadcast_to(tl.load(temperature + row), (CHUNK,)))
    chunk_max, chunk_sum = chunk_stats(tl.reshape(x, (1, CHUNK)))
    place = row * num_chunks + first_chunk + chunk + tl.arange(0, 1)
    tl.store(most + place, chunk_max)
    tl.store(total + place, chunk_sum)
    if TARGETED:
        column = tl.load(targets + row) - first_chunk.to(tl.int64) * CHUNK
        # One element at most: every other lane is masked.
        tl.store(target_logit + row + at * 0, x, mask=(at == column) & (at < V))


@triton.jit
def _fold(
    most,
    total,
    target_logit,
    out,
    N,
    CHUNKS: tl.constexpr,
    TARGETED: tl.constexpr,
    BN: tl.constexpr,
):
    """Normaliser of BN rows, chunks in ascending order; TARGETED: their target's log-prob."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = row < N
    at = row.to(tl.int64) * CHUNKS
    running = tl.full((BN,), EMPTY_MAX, dtype=tl.float32)
    sums = tl.zeros((BN,), dtype=tl.float32)
    for chunk in range(CHUNKS):
        chunk_max = tl.load(most + at + chunk, mask=is_row, other=0.0)
        chunk_sum = tl.load(total + at + chunk, mask=is_row, other=0.0)
        running, sums = fold_chunk(running, sums, chunk_max, chunk_sum)
    result = running + tl.log(sums)
    if TARGETED:
        result = tl.load(target_logit + row, mask=is_row, other=0.0) - result
    tl.store(out + row, result, mask=is_row)


@triton.jit
def _subtract(logits, norm, out, V, row_stride, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BV + tl.arange(0, BV)
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(out + row * V + at, x - tl.load(norm + row), mask=at < V)


class Stats:
    """Max and sum of every chunk of N rows, and the logits of their targets."""

    def __init__(self, like: Tensor, num_rows: int, vocabulary: int) -> None:
        self.num_chunks = -(-vocabulary // CHUNK)
        self.most_NB = like.new_empty(num_rows, self.num_chunks, dtype=torch.float32)
        self.total_NB = torch.empty_like(self.most_NB)
        # A target outside the vocabulary stays NaN.
        self.target_N = self.most_NB.new_full((num_rows,), float("nan"))

    def add(
        self,
        logits_NV: Tensor,
        first_chunk: int,
        *,
        scale: float = 1.0,
        temperature_N: Tensor | None = None,
        targets_N: Tensor | None = None,
        warps: int = 4,
    ) -> None:
        """Takes in the logits of whole chunks from `first_chunk` on, times `scale`, over the
        temperature."""
        n, v = logits_NV.shape
        _stats[(n, triton.cdiv(v, CHUNK))](
            logits_NV,
            self.most_NB,
            self.total_NB,
            self.most_NB if temperature_N is None else temperature_N,
            self.most_NB if targets_N is None else targets_N,
            self.target_N,
            v,
            logits_NV.stride(0),
            first_chunk,
            self.num_chunks,
            scale,
            SCALED=scale != 1.0,
            TEMPERED=temperature_N is not None,
            TARGETED=targets_N is not None,
            CHUNK=CHUNK,
            num_warps=warps,
            enable_fp_fusion=False,
        )

    def folded(self, *, targeted: bool, rows: int = FOLD_ROWS) -> Tensor:
        """The normaliser of every row, or the log-prob of its target."""
        n = self.most_NB.shape[0]
        out_N = torch.empty_like(self.target_N)
        _fold[(triton.cdiv(n, rows),)](
            self.most_NB,
            self.total_NB,
            self.target_N,
            out_N,
            n,
            CHUNKS=self.num_chunks,
            TARGETED=targeted,
            BN=rows,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return out_N


def log_softmax(logits_NV: Tensor, warps: int = 4, fold_rows: int = FOLD_ROWS) -> Tensor:
    n, v = logits_NV.shape
    out_NV = logits_NV.new_empty(n, v, dtype=torch.float32)
    if n == 0:
        return out_NV
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    stats = Stats(logits_NV, n, v)
    stats.add(logits_NV, 0, warps=warps)
    norm_N = stats.folded(targeted=False, rows=fold_rows)
    _subtract[(n, triton.cdiv(v, CHUNK))](
        logits_NV, norm_N, out_NV, v, logits_NV.stride(0), BV=CHUNK, num_warps=4
    )
    return out_NV
