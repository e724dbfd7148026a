"""What `suzuri doctor` can be asked. No torch here."""

import dataclasses
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Look at this machine and print one report to paste into an issue.

    It holds no user or host names, home folders, tokens or addresses. Exit code 0 when nothing is
    wrong, 1 when there is a problem (the last line names the first).
    """

    model: Positional[Path | None] = None
    """A model folder to look at as well: its disk, its files, its size beside the memory here."""

    json: bool = False
    """Print JSON instead of the table."""

    def resolve(self) -> "DoctorConfig":
        """Nothing to check: a folder that cannot be read is a line of the report."""
        return self
