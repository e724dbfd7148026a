"""What `suzuri eval` can be asked. No torch here."""

# pyright: strict

import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

MAX_COUNT = 100_000
MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Let a model answer held-out tasks and grade what it says.

    Exit code 0; 1 when a score is below what --at-least asks; 2 when it cannot be run.
    """

    model: Positional[str | None] = None
    """A folder or a hub id (default: the small model that comes with this package, nano)."""

    tasks: tuple[str, ...] = ()
    """Kinds, or kind/variant, such as arithmetic or arithmetic/add2 (default: every kind that the
    model has the towers for)."""

    count: int = 50
    """Tasks of each."""

    difficulty: tuple[float, float] = (0.0, 1.0)
    """Range from 0 to 1."""

    split: Literal["held_out", "train"] = "held_out"
    """Tasks that training never sees, or some that it may have seen."""

    seed: int = 0
    """Of the tasks, and of sampling."""

    samples: int = 1
    """Answers to each task; the score is their mean (avg@k)."""

    temperature: float = 0.0
    """0: the most likely answer."""

    max_tokens: int = 400
    """Tokens of one turn."""

    max_running: int = 32
    """Answers at once."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and arithmetic."""

    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""

    random_weights: bool = False
    """Take only the shape of the model (the scores then are those of chance)."""

    drafts: bool = False
    """Also measure how many tokens of the draft depths greedy decoding would accept."""

    at_least: float | None = None
    """Exit with 1 when the mean score of any of --tasks is below this."""

    show: int = 0
    """Print so many wrong answers of each kind."""

    out: str | None = None
    """Write everything, transcripts included, to this JSON file."""

    def resolve(self) -> "EvalConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        for name in ("count", "samples", "max_tokens", "max_running"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_COUNT:
                raise ValueError(f"--{name} {value}: must be from 1 to {MAX_COUNT}")
        low, high = self.difficulty
        if not 0 <= low <= high <= 1:
            raise ValueError(f"--difficulty {low} {high}: two rising numbers from 0 to 1")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"--temperature {self.temperature}: must be from 0 to 10")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"--samples {self.samples} with --temperature 0 gives the same answer each time"
            )
        if self.drafts and (self.temperature or self.random_weights):
            raise ValueError("--drafts: needs trained weights and --temperature 0")
        if self.at_least is not None and not 0 <= self.at_least <= 1:
            raise ValueError(f"--at-least {self.at_least}: must be from 0 to 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        if self.out is not None:
            out = Path(self.out).absolute()
            if out.is_dir() or not out.parent.is_dir():
                raise ValueError(
                    f"--out {self.out}: no file can be written there; give one in a folder that "
                    "exists"
                )
        if self.show < 0:
            raise ValueError(f"--show {self.show}: must not be negative")
        return self
