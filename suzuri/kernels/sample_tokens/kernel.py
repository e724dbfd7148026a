"""Gumbel argmax in two launches: the best id of every run of ids, then the best of those."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch

IDS = 2048
"""Ids of one program of the first launch; four share a Philox block."""
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def gumbel(word):
    """The noise of a random word, by the formula of the contract."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    survival = tl.maximum(1.0 - u, 2.9802322387695312e-08)
    return -tl.log(tl.where(u < 0.0009765625, series, -tl.log(survival)))


@triton.jit
def words(seeds, positions, samples, row, part, purpose, NUM: tl.constexpr):
    """The random words of a row's ids part * NUM .. (part + 1) * NUM - 1; four share a block."""
    block = (part * (NUM // 4) + tl.arange(0, NUM // 4)).to(tl.uint32)
    zero = block * 0
    a, b, c, d = tl.philox(
        tl.load(seeds + row),
        zero + tl.load(positions + row).to(tl.uint32),
        block,
        zero + purpose.to(tl.uint32),
        zero + tl.load(samples + row).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a0 b0 c0 d0 a1 ..


@triton.jit
def first_best(score, ids):
    """(largest score, lowest of `ids` that has it); (NaN, any) if there is a NaN."""
    is_nan = score != score  # noqa: PLR0124
    best = tl.max(tl.where(is_nan, float("-inf"), score), axis=0)
    first = tl.min(tl.where(score == best, ids, NO_ID), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), best), first


@triton.jit(do_not_specialize=["purpose"])
def _parts_kernel(
    logits,
    temperature,
    seeds,
    positions,
    samples,
    best,
    best_ids,
    row_stride,
    column_stride,
    vocabulary,
    purpose,
    NUM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * NUM + tl.arange(0, NUM)
    at = logits + row * row_stride + ids.to(tl.int64) * column_stride
    score = tl.load(at, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    divisor = tl.load(temperature + row)
    if divisor > 0:
        word = words(seeds, positions, samples, row, part, purpose, NUM)
        score = tl.div_rn(score, divisor) + gumbel(word)
    value, first = first_best(score, ids)
    place = row * tl.num_programs(1) + part
    tl.store(best + place, value)
    tl.store(best_ids + place, first)


@triton.jit
def _best_kernel(best, best_ids, out, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at, inside = row * num_parts + part, part < num_parts
    score = tl.load(best + at, mask=inside, other=float("-inf"))
    value, first = first_best(score, tl.load(best_ids + at, mask=inside, other=NO_ID))
    # NaN compares as false, and -inf is no answer either.
    tl.store(out + row, tl.where(value > float("-inf"), first, -1).to(tl.int64))


def sample_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sample_index_N: Tensor,
    purpose: int,
    *,
    block: int = IDS,
    num_warps: int = 4,
) -> Tensor:
    if logits_NV.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"sample_tokens of {logits_NV.dtype}", logits_NV)
    num_rows, vocabulary = logits_NV.shape
    device = logits_NV.device
    out_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out_N
    parts = triton.cdiv(vocabulary, block)
    best = torch.empty(num_rows, parts, dtype=torch.float32, device=device)
    best_ids = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    _parts_kernel[(num_rows, parts)](
        logits_NV,
        temperature_N.to(torch.float32).contiguous(),
        seeds_N.contiguous(),
        positions_N.contiguous(),
        sample_index_N.contiguous(),
        best,
        best_ids,
        *logits_NV.stride(),
        vocabulary,
        purpose,
        NUM=block,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    padded = triton.next_power_of_2(parts)
    _best_kernel[(num_rows,)](best, best_ids, out_N, parts, PARTS=padded, num_warps=num_warps)
    return out_N
