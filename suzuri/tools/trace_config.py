"""What `suzuri trace` can be asked. No torch here."""

import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

DEFAULT_TOKENS = 40
MAX_TOKENS = 100_000
MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Run a golden folder (or a shape with random weights) and show the differences.

    Exit code 0 when every item is within tolerance, 1 when one is not (the last line names it),
    2 when the input cannot be used.
    """

    directory: Positional[Path | None] = None
    """Golden folder: original/ (a checkpoint) and expected.safetensors; or media.safetensors. Or a
    checkpoint without expected numbers, which is then checked against itself."""

    layout: Literal["released"] = "released"
    """Which of the folder's checkpoints to load."""

    random_weights: bool = False
    """No checkpoint: draw weights for the shape in --config and check it against itself."""

    config: str | None = None
    """With --random-weights: a config.json, a folder with one, or a preset (tiny, inkling, ...)."""

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic. The tolerances are meant for float32."""

    num_tokens: int | None = None
    """Without expected numbers: prompt length (default 40)."""

    seed: int | None = None
    """Without expected numbers: seed of the prompt, and of random weights (default 0)."""

    def resolve(self) -> "TraceConfig":
        """Checks fields against each other. Raises ValueError naming the flag and the fix."""
        if self.random_weights:
            if self.directory is not None:
                raise ValueError(
                    "--random-weights takes its shape from --config FILE, not a folder"
                )
            if self.config is None:
                raise ValueError("--random-weights needs --config FILE (or a preset's name)")
        elif self.config is not None:
            raise ValueError(
                "--config goes with --random-weights; a golden folder has its own config"
            )
        elif self.directory is None:
            raise ValueError("give a golden folder, or --random-weights --config FILE")
        if self.num_tokens is not None and not 2 <= self.num_tokens <= MAX_TOKENS:
            raise ValueError(f"--num-tokens {self.num_tokens}: must be from 2 to {MAX_TOKENS}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        return self
