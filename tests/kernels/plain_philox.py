"""Philox4x32-10 in Python's unbounded integers."""


def philox_words(seed: int, counter: list[int]) -> list[int]:
    """The four words of a 64-bit key (signed or not) and four counter words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed % 2**32, seed // 2**32 % 2**32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b % 2**32, a >> 32 ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]
