"""The chunked normaliser on a GPU (docs/exactness.md rule 7); `Stats` is also that of
token_logprobs, so that both give one log-prob.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.triton_math import EMPTY_MAX, chunk_stats, fold_chunk, tree_sum

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
    moment,
    V,
    row_stride,
    first_chunk,
    num_chunks,
    scale,
    SCALED: tl.constexpr,
    TEMPERED: tl.constexpr,
    TARGETS: tl.constexpr,
    MOMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk of these logits): max and sum into column first_chunk + chunk of the
    stats, with MOMENTS also the sum of exp(x - max) * (x - max); the logits of those of the row's
    TARGETS targets that lie in the chunk into target_logit."""
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
    if MOMENTS:
        below = x - tl.broadcast_to(chunk_max, (CHUNK,))
        share = tl.exp(below)
        terms = tl.where(share > 0, share * below, 0.0)  # nothing of what is masked: 0 * -inf
        tl.store(moment + place, tree_sum(tl.reshape(terms, (1, CHUNK))))
    for k in range(TARGETS):
        own = row * TARGETS + k
        column = tl.load(targets + own) - first_chunk.to(tl.int64) * CHUNK
        # One element at most: every other lane is masked.
        tl.store(target_logit + own + at * 0, x, mask=(at == column) & (at < V))


@triton.jit
def _fold(
    most,
    total,
    moment,
    out,
    entropy,
    N,
    CHUNKS: tl.constexpr,
    MOMENTS: tl.constexpr,
    BN: tl.constexpr,
):
    """Normaliser of BN rows, chunks in ascending order; with MOMENTS also their entropy."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = row < N
    at = row.to(tl.int64) * CHUNKS
    running = tl.full((BN,), EMPTY_MAX, dtype=tl.float32)
    sums = tl.zeros((BN,), dtype=tl.float32)
    moments = tl.zeros((BN,), dtype=tl.float32)
    for chunk in range(CHUNKS):
        chunk_max = tl.load(most + at + chunk, mask=is_row, other=0.0)
        chunk_sum = tl.load(total + at + chunk, mask=is_row, other=0.0)
        new_max, new_sums = fold_chunk(running, sums, chunk_max, chunk_sum)
        if MOMENTS:
            own = tl.load(moment + at + chunk, mask=is_row, other=0.0)
            lost, less = running - new_max, chunk_max - new_max
            own = tl.exp(less) * (own + less * chunk_sum)
            moments = tl.exp(lost) * (moments + lost * sums) + own
        running, sums = new_max, new_sums
    tl.store(out + row, running + tl.log(sums), mask=is_row)
    if MOMENTS:
        tl.store(entropy + row, tl.log(sums) - tl.div_rn(moments, sums), mask=is_row)


@triton.jit
def _subtract(logits, norm, out, V, row_stride, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BV + tl.arange(0, BV)
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(out + row * V + at, x - tl.load(norm + row), mask=at < V)


class Stats:
    """Max and sum of every chunk of N rows, and the logits of their targets; for the entropy also
    the moments."""

    def __init__(
        self, like: Tensor, num_rows: int, vocabulary: int, num_targets: int, moments: bool
    ) -> None:
        self.num_chunks = -(-vocabulary // CHUNK)
        self.most_NB = like.new_empty(num_rows, self.num_chunks, dtype=torch.float32)
        self.total_NB = torch.empty_like(self.most_NB)
        self.moment_NB = torch.empty_like(self.most_NB) if moments else None
        # A target outside the vocabulary stays NaN.
        self.target_NK = self.most_NB.new_full((num_rows, num_targets), float("nan"))

    def add(
        self,
        logits_NV: Tensor,
        first_chunk: int,
        *,
        scale: float = 1.0,
        temperature_N: Tensor | None = None,
        targets_NK: Tensor | None = None,
        warps: int = 4,
    ) -> None:
        """Takes in the logits of whole chunks from `first_chunk` on, times `scale`, over the
        temperature. Targets are contiguous."""
        n, v = logits_NV.shape
        _stats[(n, triton.cdiv(v, CHUNK))](
            logits_NV,
            self.most_NB,
            self.total_NB,
            self.most_NB if temperature_N is None else temperature_N,
            self.most_NB if targets_NK is None else targets_NK,
            self.target_NK,
            self.most_NB if self.moment_NB is None else self.moment_NB,
            v,
            logits_NV.stride(0),
            first_chunk,
            self.num_chunks,
            scale,
            SCALED=scale != 1.0,
            TEMPERED=temperature_N is not None,
            TARGETS=0 if targets_NK is None else targets_NK.shape[1],
            MOMENTS=self.moment_NB is not None,
            CHUNK=CHUNK,
            num_warps=warps,
            enable_fp_fusion=False,
        )

    def folded(self, rows: int = FOLD_ROWS) -> tuple[Tensor, Tensor | None]:
        """The normaliser of every row, and its entropy if moments were taken."""
        n = self.most_NB.shape[0]
        norm_N = self.most_NB.new_empty(n)
        entropy_N = None if self.moment_NB is None else torch.empty_like(norm_N)
        _fold[(triton.cdiv(n, rows),)](
            self.most_NB,
            self.total_NB,
            self.most_NB if self.moment_NB is None else self.moment_NB,
            norm_N,
            norm_N if entropy_N is None else entropy_N,
            n,
            CHUNKS=self.num_chunks,
            MOMENTS=entropy_N is not None,
            BN=rows,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return norm_N, entropy_N


def log_softmax(logits_NV: Tensor, warps: int = 4, fold_rows: int = FOLD_ROWS) -> Tensor:
    n, v = logits_NV.shape
    out_NV = logits_NV.new_empty(n, v, dtype=torch.float32)
    if n == 0:
        return out_NV
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    stats = Stats(logits_NV, n, v, num_targets=0, moments=False)
    stats.add(logits_NV, 0, warps=warps)
    norm_N, _ = stats.folded(fold_rows)
    _subtract[(n, triton.cdiv(v, CHUNK))](
        logits_NV, norm_N, out_NV, v, logits_NV.stride(0), BV=CHUNK, num_warps=4
    )
    return out_NV
