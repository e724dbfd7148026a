"""What `suzuri plot` can be asked. No torch here."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw the metrics of one or several runs: a curve for each number against the step, runs over
    each other.

    Exit code 0, 2 when the input cannot be used.
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="DIR...")] = ()
    """Folders of runs (or their metrics.jsonl)."""

    out: Annotated[str, arg(metavar="FILE")] = "metrics.png"
    """The PNG to write."""

    keys: tuple[str, ...] = ()
    """Only these numbers, or groups of them (train/loss, optim, eval); default: all but time/*."""

    def resolve(self) -> "PlotConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not self.runs:
            raise ValueError("give at least one folder of a run, as suzuri sft --run-dir wrote it")
        if not self.out.endswith(".png"):
            raise ValueError(f"--out {self.out}: must end with .png")
        return self
