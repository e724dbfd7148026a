"""What `suzuri trace` can be asked. No torch here."""

import dataclasses
from typing import Literal

from tyro.conf import Positional

from suzuri.model.tensor_names import OPTIONAL_PARTS

DEFAULT_TOKENS = 40
TEXT_PARTS = frozenset({"mtp"})
"""Optional parts of a model without towers."""
MAX_TOKENS = 100_000
MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Run a golden folder (or a model, or a shape with random weights) and show the differences.

    Exit code 0 when every item is within tolerance, 1 when one is not (the last line names it),
    2 when the input cannot be used.
    """

    model: Positional[str | None] = None
    """Golden folder: expected.safetensors beside original/ and transformers/ (checkpoints); or
    media.safetensors. Or a model without expected numbers (a folder or a hub id), which is then
    checked against itself. With --random-weights also a config.json or a preset (tiny, ...)."""

    layout: Literal["released", "transformers"] | None = None
    """Which of a golden folder's checkpoints to load (default: released)."""

    random_weights: bool = False
    """Take only the shape of the model, draw its weights, and check it against itself."""

    config: str | None = None
    """With --random-weights: another way to give the model."""

    text_only: bool = False
    """Leave the towers out, whether or not the files hold them."""

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic. The tolerances are meant for float32."""

    num_tokens: int | None = None
    """Without expected numbers: prompt length (default 40)."""

    seed: int | None = None
    """Without expected numbers: seed of the prompt, and of random weights (default 0)."""

    @property
    def want(self) -> frozenset[str]:
        """The optional parts to load."""
        return TEXT_PARTS if self.text_only else frozenset(OPTIONAL_PARTS)

    def resolve(self) -> "TraceConfig":
        """Checks fields against each other. Raises ValueError naming the flag and the fix."""
        if self.random_weights:
            if self.model is not None and self.config is not None:
                raise ValueError(f"two models, {self.model} and --config {self.config}; give one")
            if self.layout is not None:
                raise ValueError("--layout chooses a checkpoint; --random-weights reads none")
        elif self.config is not None:
            raise ValueError(
                "--config goes with --random-weights; a golden folder has its own config"
            )
        if self.model is None and self.config is None:
            raise ValueError("give a golden folder or a model (with --random-weights its shape)")
        if self.num_tokens is not None and not 2 <= self.num_tokens <= MAX_TOKENS:
            raise ValueError(f"--num-tokens {self.num_tokens}: must be from 2 to {MAX_TOKENS}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        return self
