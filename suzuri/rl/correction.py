"""Data of older weights: how far off they are, and what is done about it. No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from suzuri.types import Array, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """What happens to a token that today's weights find w = exp(p - q) times as likely as those
    that drew it (p: the trainer's log-prob before the first step on the batch, q: the sampler's).

    truncate: its weight is multiplied by min(w, cap) (Espeholt et al., "IMPALA", 2018; Yao et al.,
    "Your efficient RL framework secretly brings you off-policy training", 2025). mask: it counts
    only while 1 / cap <= w <= cap. none: nothing. With any of the first two a loss measures its
    ratios from p, not from q: w has made up for the rest.
    """

    kind: Literal["none", "truncate", "mask"] = "none"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in ("none", "truncate", "mask"):
            raise ValueError(f"kind = {self.kind!r}: must be none, truncate or mask")
        if not 1 <= self.cap < float("inf"):
            raise ValueError(f"cap = {self.cap}: must be a ratio of 1 or more")

    def corrected(
        self, samples: Sequence[Sample], logprobs: Sequence[Array]
    ) -> tuple[list[Sample], dict[str, float]]:
        """`logprobs` [T] of each sample: p. Also metrics: the effective sample size as a share of
        the tokens, (sum w)^2 / (n sum w^2), and the share of tokens that was cut or masked."""
        found: list[Sample] = []
        ratios: list[Array] = []
        touched = 0
        for sample, theirs in zip(samples, logprobs, strict=True):
            weights = sample.inputs["weights"]
            is_drawn = weights != 0
            p = np.where(is_drawn, theirs, 0.0).astype(np.float32)
            w = np.where(is_drawn, np.exp(p - sample.inputs["logprobs"]), 0.0).astype(np.float32)
            ratios.append(w[is_drawn])
            if self.kind == "none":
                found.append(sample)
                continue
            if self.kind == "truncate":
                factor = np.minimum(w, self.cap)
                touched += int((w > self.cap).sum())
            else:
                factor = ((w >= 1 / self.cap) & (w <= self.cap)).astype(np.float32)
                touched += int((is_drawn & (factor == 0)).sum())
            inputs = {**sample.inputs, "weights": weights * factor, "logprobs": p}
            found.append(dataclasses.replace(sample, inputs=inputs))
        w = np.concatenate(ratios) if ratios else np.zeros(0, np.float32)
        return found, {
            "correction/effective_sample_size": effective_sample_size(w),
            "correction/touched": touched / max(len(w), 1),
        }


def effective_sample_size(w: Array) -> float:
    """(sum w)^2 / (n sum w^2) from 0 to 1; 1 for no weights at all."""
    wide = w.astype(np.float64)
    squares = float((wide * wide).sum())
    return float(wide.sum()) ** 2 / (len(wide) * squares) if squares else 1.0
