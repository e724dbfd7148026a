"""Whether sampler and trainer see the same model: they must, to the bit. No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Sequence

import numpy as np

from suzuri.types import Array, Sample


@dataclasses.dataclass
class Agreement:
    """Differences of log-probs q - p of drawn tokens, q the sampler's when it drew them, p the
    trainer's own, from a forward of its own before any step on them."""

    largest: float = 0.0
    total: float = 0.0
    num_tokens: int = 0

    def add(self, samples: Sequence[Sample], logprobs: Sequence[Array]) -> None:
        """`logprobs` [T] of each sample. A number that is none counts as infinitely far off.
        Samples that do not say what the sampler found are left out."""
        for sample, p in zip(samples, logprobs, strict=True):
            if "logprobs" not in sample.inputs:
                continue
            is_drawn = sample.inputs["weights"] != 0
            difference = (sample.inputs["logprobs"] - p)[is_drawn].astype(np.float64)
            difference = np.where(np.isfinite(difference), difference, np.inf)
            if difference.size:
                self.largest = max(self.largest, float(np.abs(difference).max()))
                self.total += float(difference.sum())
                self.num_tokens += int(difference.size)

    def metrics(self) -> dict[str, float]:
        """Without tokens nothing was compared, and only that is said."""
        found = {"kl/tokens": float(self.num_tokens)}
        if self.num_tokens:
            found["kl/sampler_trainer_max"] = self.largest
            found["kl/sampler_trainer_mean"] = self.total / self.num_tokens
        return found
