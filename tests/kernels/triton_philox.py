"""Triton's own `tl.philox` over tensors (imported where Triton exists)."""

import importlib

import torch
from torch import Tensor

triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")
BLOCK_SIZE = 128
BLOCK = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _kernel(seed, c0, c1, c2, c3, out, count):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    words = tl.philox(
        tl.load(seed + at, inside),
        tl.load(c0 + at, inside).to(tl.uint32),
        tl.load(c1 + at, inside).to(tl.uint32),
        tl.load(c2 + at, inside).to(tl.uint32),
        tl.load(c3 + at, inside).to(tl.uint32),
    )
    for word in tl.static_range(4):
        tl.store(out + word * count + at, words[word].to(tl.int64), inside)


def triton_philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Arguments and results as those of suzuri.kernels.philox."""
    given = [x.contiguous() for x in torch.broadcast_tensors(seed, c0, c1, c2, c3)]
    out = torch.empty(4, *given[0].shape, dtype=torch.int64, device=seed.device)
    count = given[0].numel()
    _kernel[(triton.cdiv(count, BLOCK_SIZE),)](*given, out, count)
    return list(out.unbind(0))
