"""How new weights come to a sampler that is another process: a folder that both sides see.

No file outlives its publication, not even that of a run that was killed, which removes it when it
goes on.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false

import hashlib
import os
import shutil
from pathlib import Path

from torch import nn

from suzuri.model.inkling import Inkling
from suzuri.model.weights import export_weights
from suzuri.types import SamplerLost

MEMORY = Path("/dev/shm")
"""Files here are memory (Linux)."""
ROOM = 1.25
"""Of the memory that weights take; the rest is for everybody else."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PublicationError(SamplerLost):
    """New weights did not arrive as they were sent. The old ones do not serve any more either."""


class Handover:
    """Where the weights of a run are handed over: below `run_dir`, or, for a server at `host` on
    this machine, in memory as long as there is room; or in `folder` if that is given."""

    def __init__(self, run_dir: str | Path, host: str, folder: str | None = None) -> None:
        path = Path(os.path.realpath(run_dir))
        name = "suzuri-" + hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
        self._memory = MEMORY / name
        self._may_be_memory = folder is None and host in LOOPBACK and MEMORY.is_dir()
        self._places = [self._memory] if self._may_be_memory else []
        self._places.append(path / "publication" if folder is None else Path(folder) / name)

    def folder(self, version: int, num_bytes: int) -> Path:
        """A new one, for weights of this size. Removes those of publications that ended early.
        Raises OSError or ValueError for a place that cannot be used."""
        self.clear()
        place = self._places[-1]
        if self._may_be_memory and shutil.disk_usage(MEMORY).free > ROOM * num_bytes:
            place = self._memory
        _make(place)
        return Path(os.path.realpath(place)) / f"version-{version}"

    def clear(self) -> None:
        """Removes all weights that were handed over."""
        for place in self._places:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)


def write_weights(model: nn.Module, folder: Path) -> None:
    """A checkpoint folder with the bits of the model, which appears whole or not at all."""
    assert isinstance(model, Inkling)
    dtype = str(model.decoder.norm.weight.dtype).removeprefix("torch.")
    export_weights(model, folder, dtype=dtype)


def _make(place: Path) -> None:
    """For this user alone, where it is not there yet."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise ValueError(f"{place} is not this user's own folder; remove it or give another")
