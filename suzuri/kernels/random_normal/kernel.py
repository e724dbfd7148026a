"""Philox, halves and the table of quantiles in one launch. All integers but the table's values."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.random_normal import reference

PER_BLOCK = tl.constexpr(reference.PER_BLOCK)
BLOCKS = 256
"""Philox blocks, of eight numbers each, of one program."""


@triton.jit(do_not_specialize=["stream", "begin", "skip"])
def _kernel(seed, table, out, stream, begin, skip, count, NUM: tl.constexpr):
    local = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    block = begin + local
    zero = (block * 0).to(tl.uint32)
    words = tl.philox(
        tl.load(seed),
        (block & 0xFFFFFFFF).to(tl.uint32),
        (block >> 32).to(tl.uint32),
        zero + stream.to(tl.uint32),
        zero,
    )
    for word in tl.static_range(4):
        for half in tl.static_range(2):
            at = local * PER_BLOCK + (2 * word + half) - skip
            inside = (at >= 0) & (at < count)
            bits = (words[word] >> (16 * half)) & 0xFFFF
            tl.store(out + at, tl.load(table + bits.to(tl.int32)), mask=inside)


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(reference.quantiles(), dtype=torch.float32, device=device)


def random_normal(seed: Tensor, stream: int, first: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.float32, device=seed.device)
    if not count:
        return out
    begin, end = first // reference.PER_BLOCK, -(-(first + count) // reference.PER_BLOCK)
    _kernel[(triton.cdiv(end - begin, BLOCKS),)](
        seed,
        _table(seed.device),
        out,
        stream,
        begin,
        first - begin * reference.PER_BLOCK,
        count,
        NUM=BLOCKS,
        num_warps=4,
    )
    return out
