"""Sums over blocks of words that tell contents apart, at the speed at which memory is read.

A block's sum is that of each word times a key of its place, modulo 2^64. Keys are odd, and no two
have the same low 32 bits: so another word, and two words in each other's places, give another sum
for certain, and anything else does but for one chance in 2^64 or so (Carter and Wegman,
"Universal classes of hash functions", 1979). Integers: the same on every device.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import functools

import torch
from torch import Tensor

from suzuri.kernels.arrays import array
from suzuri.kernels.exact import has_loops

BLOCK = 4096
"""Words of a block: 16 KB."""
CHUNK = 4096
"""Blocks whose products lie in memory at one time where no compiled loop runs."""


@functools.lru_cache(maxsize=8)
def keys(device: torch.device) -> Tensor:
    """int64 [BLOCK]."""
    found: list[int] = []
    for place in range(BLOCK):
        low = place * 0x1E3779B1 % 2**31 * 2 + 1  # an odd factor: all differ
        mixed = (place + 1) * 0x9E3779B97F4A7C15 % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
        high = mixed % 2**32
        found.append((high - 2**32 if high >= 2**31 else high) * 2**32 + low)
    return torch.tensor(found, dtype=torch.int64, device=device)


def block_sums(words_N: Tensor) -> Tensor:
    """int64 [ceil(N / BLOCK)] of int32 [N], contiguous, on its device."""
    count, key = words_N.numel(), keys(words_N.device)
    num_blocks = -(-count // BLOCK)
    found = words_N.new_empty(num_blocks, dtype=torch.int64)
    if words_N.is_cpu and has_loops():
        from suzuri.kernels import loops

        loops.block_sums(array(words_N), array(key), array(found))
        return found
    whole = count // BLOCK
    blocks = words_N[: whole * BLOCK].reshape(whole, BLOCK)
    for first in range(0, whole, CHUNK):
        chunk = slice(first, min(first + CHUNK, whole))
        found[chunk] = _halved(blocks[chunk] * key)
    if whole < num_blocks:
        rest = words_N.new_zeros(1, BLOCK)
        rest[0, : count - whole * BLOCK] = words_N[whole * BLOCK :]
        found[whole:] = _halved(rest * key)
    return found


def _halved(products_BN: Tensor) -> Tensor:
    """Their sums [B]: halves are added to each other until one number is left."""
    while (width := products_BN.shape[1] // 2) > 0:
        products_BN = products_BN[:, :width] + products_BN[:, width:]
    return products_BN[:, 0]
