"""Philox in 64-bit integers (PyTorch has no full unsigned arithmetic)."""

from torch import Tensor

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key_0, key_1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = (
            _high(c2, MULTIPLIER_1) ^ c1 ^ key_0,
            (c2 * MULTIPLIER_1) & MASK,
            _high(c0, MULTIPLIER_0) ^ c3 ^ key_1,
            (c0 * MULTIPLIER_0) & MASK,
        )
        key_0, key_1 = (key_0 + WEYL_0) & MASK, (key_1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def _high(x: Tensor, multiplier: int) -> Tensor:
    """High 32 bits of the 64-bit product, by halves: the whole would overflow a signed word."""
    return ((x >> 16) * multiplier + (((x & 0xFFFF) * multiplier) >> 16)) >> 16
