"""What `suzuri verify` can be asked. No torch here."""

import dataclasses
from typing import Literal

from tyro.conf import Positional

MIN_TOKENS = 24
MAX_TOKENS = 100_000
MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Prove that a token's numbers do not depend on how it is served, bit for bit.

    Every hidden row and all logits of chunked prefill, decode, ragged batches, prefix hits,
    preemption and more are compared with one forward over the whole sequence without a cache. Exit
    code 0 when all bits are equal, 1 when some are not (the last line names the first check), 2
    when the input cannot be used.
    """

    model: Positional[str]
    """A model folder or a hub id. With --random-weights also a config.json or a preset (tiny)."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights, activations and caches."""

    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, ..."""

    seed: int = 0
    """Seed of prompts, of sampling, of the random interleavings, and of random weights."""

    tokens: int | None = None
    """Length of the longer prompts (default: beyond the model's window, at least 40)."""

    fast: bool = False
    """Fewer sizes of pages and chunks and fewer interleavings; each check still runs."""

    def resolve(self) -> "VerifyConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not self.model.strip():
            raise ValueError(
                "MODEL is empty; give a model folder, or a preset and --random-weights"
            )
        if self.tokens is not None and not MIN_TOKENS <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"--tokens {self.tokens}: must be from {MIN_TOKENS} to {MAX_TOKENS}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
            raise ValueError(f"--device {self.device}: must be cpu, cuda or cuda:N")
        return self
