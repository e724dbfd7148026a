"""Head and draw on a GPU: a product per slice of the vocabulary into one buffer, one launch that
reads it (noise, best id, sums of exp, per chunk), and one at the end that joins the chunks.

The pieces are those of matmul, sample_tokens and log_softmax, and with them the bits.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.draw_tokens.slices import CHUNK, slices
from suzuri.kernels.matmul import kernel as matmul
from suzuri.kernels.sample_tokens.kernel import NO_ID, first_best, gumbel, words
from suzuri.kernels.triton_math import EMPTY_MAX, chunk_stats, fold_chunk


@triton.jit
def _store_stats(most, total, place, x, NUM: tl.constexpr):
    chunk_max, chunk_sum = chunk_stats(tl.reshape(x, (1, NUM)))
    at = place + tl.arange(0, 1)
    tl.store(most + at, chunk_max)
    tl.store(total + at, chunk_sum)


@triton.jit(do_not_specialize=["first_chunk", "purpose"])
def _chunks(
    logits,
    temperature,
    seeds,
    positions,
    samples,
    wants,
    best,
    best_ids,
    best_logits,
    peaks,
    most,
    total,
    width,
    first_chunk,
    num_chunks,
    purpose,
    NOISY: tl.constexpr,
    SCORES: tl.constexpr,
    NUM: tl.constexpr,
):
    """Program (row, chunk of the slice's `width` columns): best score, its id and logit, and the
    largest logit (NaN if there is one); with SCORES the stats of the logits and of those over the
    temperature, as far as the row wants them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * NUM + tl.arange(0, NUM)
    chunk = first_chunk + part
    ids = chunk * NUM + tl.arange(0, NUM)
    inside = column < width
    x = tl.load(logits + row * width + column, mask=inside, other=float("-inf"))
    place = row * num_chunks + chunk
    is_nan = x != x  # noqa: PLR0124
    peak = tl.max(tl.where(is_nan, float("-inf"), x), axis=0)
    peak = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), peak)
    tl.store(peaks + place, peak)
    tempered = x
    score = x
    if NOISY:
        divisor = tl.load(temperature + row)
        if divisor > 0:
            word = words(seeds, positions, samples, row, chunk, purpose, NUM)
            tempered = tl.div_rn(x, divisor)
            score = tempered + gumbel(word)
    value, first = first_best(score, ids)
    tl.store(best + place, value)
    tl.store(best_ids + place, first)
    tl.store(best_logits + place, tl.max(tl.where(ids == first, x, float("-inf")), axis=0))
    if SCORES:
        want = tl.load(wants + row)
        if want % 2 > 0:
            _store_stats(most, total, place, x, NUM)
        if want // 2 % 2 > 0:
            of_tempered = tl.num_programs(0).to(tl.int64) * num_chunks
            _store_stats(most, total, of_tempered + place, tempered, NUM)


@triton.jit
def _join(
    temperature,
    wants,
    best,
    best_ids,
    best_logits,
    peaks,
    most,
    total,
    out,
    logprobs,
    NOISY: tl.constexpr,
    SCORES: tl.constexpr,
    NUM: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (row): the first best of its chunks; the raw and the sampled log-prob side by side,
    chunks folded in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    part = tl.arange(0, PARTS)
    at, inside = row * CHUNKS + part, part < CHUNKS
    score = tl.load(best + at, mask=inside, other=float("-inf"))
    value, first = first_best(score, tl.load(best_ids + at, mask=inside, other=NO_ID))
    peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
    # NaN compares as false.
    broken = tl.max((peak < float("inf")).to(tl.int32) == 0, axis=0) > 0
    known = (value > float("-inf")) & (broken == 0)
    first = tl.where(known, first, -1)
    tl.store(out + row, first.to(tl.int64))
    if SCORES:
        want = tl.load(wants + row)
        kind = tl.arange(0, 2)
        logit = tl.load(best_logits + row * CHUNKS + tl.maximum(first, 0) // NUM + kind * 0)
        certain = kind > 0
        if NOISY:
            divisor = tl.load(temperature + row + kind * 0)
            certain = (kind > 0) & (divisor <= 0)
            logit = tl.div_rn(logit, tl.where((kind > 0) & (divisor > 0), divisor, 1.0))
        of_kind = (kind * num_rows + row) * CHUNKS
        asked = (want >> kind) % 2 > 0
        running = tl.full((2,), EMPTY_MAX, dtype=tl.float32)
        sums = tl.zeros((2,), dtype=tl.float32)
        for chunk in range(CHUNKS):
            chunk_max = tl.load(most + of_kind + chunk, mask=asked, other=0.0)
            chunk_sum = tl.load(total + of_kind + chunk, mask=asked, other=0.0)
            running, sums = fold_chunk(running, sums, chunk_max, chunk_sum)
        logprob = logit - (running + tl.log(tl.where(asked, sums, 1.0)))
        logprob = tl.where(certain, 0.0, logprob)
        logprob = tl.where(asked & (first >= 0), logprob, float("nan"))
        tl.store(logprobs + kind * num_rows + row, logprob)


def draw_tokens(
    h_ND: Tensor,
    unembed_VD: Tensor,
    draws: Draws | None,
    wants_N: Tensor | None,
    scale: float,
    purpose: int,
    width: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h_ND, unembed_VD = matmul.rows_contiguous(h_ND), matmul.rows_contiguous(unembed_VD)
    n, vocabulary = h_ND.shape[0], unembed_VD.shape[0]
    device = h_ND.device
    chunks = triton.cdiv(vocabulary, CHUNK)
    out_N = torch.empty(n, dtype=torch.int64, device=device)
    scores = wants_N is not None
    logprobs_2N = torch.empty(2 if scores else 0, n, dtype=torch.float32, device=device)
    if n:
        # Best score and its logit, the largest logit; max and sum of both kinds of log-prob.
        found = torch.empty(7 if scores else 3, n, chunks, dtype=torch.float32, device=device)
        best, best_logits, peaks, *stats = found.unbind(0)
        most, total = (stats[0], stats[2]) if scores else (best, best)
        best_ids = torch.empty(n, chunks, dtype=torch.int32, device=device)
        temperature, *counters = draws or (best,) * 4
        temperature = temperature.to(torch.float32).contiguous()
        counters = [counter_N.contiguous() for counter_N in counters]
        wants = best if wants_N is None else wants_N.contiguous()
        shared = (best, best_ids, best_logits, peaks, most, total)
        modes = {"NOISY": draws is not None, "SCORES": scores, "NUM": CHUNK}
        parts = list(slices(n, vocabulary, width))
        most_columns = max(end - first for first, end in parts)
        buffer = torch.empty(n * most_columns, dtype=torch.float32, device=device)
        for first, end in parts:
            rows_BD = unembed_VD[first:end]
            logits_NB = buffer[: n * (end - first)].view(n, end - first)
            units = matmul.num_multiprocessors(device)
            tile = matmul.tile_for(n, end - first, h_ND.dtype, units)
            matmul.launch(h_ND, rows_BD, logits_NB, scale, tile)
            _chunks[(n, triton.cdiv(end - first, CHUNK))](
                logits_NB,
                temperature,
                *counters,
                wants,
                *shared,
                end - first,
                first // CHUNK,
                chunks,
                purpose,
                **modes,
                num_warps=4,
                enable_fp_fusion=False,
            )
        _join[(n,)](
            temperature,
            wants,
            *shared,
            out_N,
            logprobs_2N,
            **modes,
            CHUNKS=chunks,
            PARTS=triton.next_power_of_2(chunks),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return (out_N, logprobs_2N[0], logprobs_2N[1]) if scores else (out_N, None, None)
