"""A penalty that grows with the length of an answer near its limit. No torch here."""

# pyright: strict

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """0 up to `longest - cache` tokens, then falling in a line to -`weight` at `longest` and beyond
    (Yu et al., "DAPO", 2025: soft overlong punishment)."""

    longest: int
    cache: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.longest:
            raise ValueError(
                f"cache = {self.cache}, longest = {self.longest}: need 0 < cache <= longest"
            )

    def __call__(self, num_tokens: int) -> float:
        over = num_tokens - (self.longest - self.cache)
        return -self.weight * min(max(over / self.cache, 0.0), 1.0)
