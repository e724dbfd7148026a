"""Where pulled files go: into the hub's cache, or into a folder of the user's.

Both keep a file that is on its way under a name made of its hash, so that a later run goes on with
it, and show it under its own name only when it is complete. No torch here.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from suzuri.model.hub import HubFile

UNFINISHED = ".suzuri.incomplete"
HASH_PIECE = 1 << 22


class Stopped(Exception):
    """Work was given up because the user, or another file's fault, asked for it."""


class Place(Protocol):
    """A destination for the files of one commit."""

    @property
    def folder(self) -> Path:
        """The model folder that the files make up."""
        ...

    def held(self, file: HubFile) -> Path | None:
        """The file's bytes if they are here with the right size, else None."""
        ...

    def proven(self, file: HubFile) -> bool:
        """Whether what is held was once checked by its hash, and has not been written since."""
        ...

    def unfinished(self, file: HubFile) -> Path:
        """Where the bytes gather until all are there."""
        ...

    def lock(self, file: HubFile) -> Path:
        """The lock file that two processes share while one fetches the file."""
        ...

    def put(self, file: HubFile, source: Path, *, proven: bool) -> None:
        """Show complete bytes under the file's name; `source` is what `held` or `unfinished` gave.

        `proven`: their hash was checked.
        """
        ...

    def finish(self) -> None:
        """Called once, when every file is in place."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlace:
    """The hub's cache, in its documented layout, so that every other program finds the files.

    blobs/ has the bytes by hash, snapshots/COMMIT/ links to them by name, refs/ the commit that a
    branch stands for.
    """

    storage: Path
    commit: str
    revision: str

    @property
    def folder(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def held(self, file: HubFile) -> Path | None:
        blob = self.storage / "blobs" / file.digest
        return next((p for p in (blob, self.folder / file.name) if _has_size(p, file.size)), None)

    def proven(self, file: HubFile) -> bool:
        return True  # a blob is named by its hash only when it is complete

    def unfinished(self, file: HubFile) -> Path:
        return self.storage / "blobs" / (file.digest + UNFINISHED)

    def lock(self, file: HubFile) -> Path:
        return self.storage.parent / ".locks" / self.storage.name / f"{file.digest}.lock"

    def put(self, file: HubFile, source: Path, *, proven: bool) -> None:
        shown, blob = self.folder / file.name, self.storage / "blobs" / file.digest
        if source == shown:
            return  # a cache without links holds the bytes here
        if source != blob:
            os.replace(source, blob)
        if _same_file(shown, blob):
            return
        shown.parent.mkdir(parents=True, exist_ok=True)
        link = shown.with_name(f"{shown.name}.{os.getpid()}.{threading.get_ident()}.link")
        try:
            link.symlink_to(os.path.relpath(blob, shown.parent))
        except OSError:
            os.replace(blob, shown)  # no links on this file system
        else:
            os.replace(link, shown)

    def finish(self) -> None:
        if self.revision == self.commit:
            return
        ref = self.storage / "refs" / self.revision
        if not ref.is_file() or ref.read_text() != self.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            fresh.write_text(self.commit)
            os.replace(fresh, ref)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderPlace:
    """A folder of the user's; .cache/suzuri/ in it has what is on its way and what was checked."""

    folder: Path

    def held(self, file: HubFile) -> Path | None:
        path = self.folder / file.name
        return path if _has_size(path, file.size) else None

    def proven(self, file: HubFile) -> bool:
        try:
            record: Any = json.loads(self._record(file).read_bytes())
        except (OSError, ValueError):
            return False
        path = self.folder / file.name
        if not isinstance(record, dict) or not _has_size(path, file.size):
            return False
        fields = cast(dict[str, Any], record)
        return fields == {"digest": file.digest, "mtime_ns": path.stat().st_mtime_ns}

    def unfinished(self, file: HubFile) -> Path:
        return self._notes / (file.digest + UNFINISHED)

    def lock(self, file: HubFile) -> Path:
        return self._notes / f"{file.digest}.lock"

    def put(self, file: HubFile, source: Path, *, proven: bool) -> None:
        path = self.folder / file.name
        if source != path:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, path)
        if not proven:
            self._record(file).unlink(missing_ok=True)
        elif not self.proven(file):
            self._note(file, path)

    def finish(self) -> None:
        pass

    def _note(self, file: HubFile, path: Path) -> None:
        """Remember that the hash was right; without it the file is hashed again, no worse."""
        record = self._record(file)
        text = json.dumps({"digest": file.digest, "mtime_ns": path.stat().st_mtime_ns})
        with contextlib.suppress(OSError):  # a folder that may only be read
            record.parent.mkdir(parents=True, exist_ok=True)
            fresh = record.with_name(f"{record.name}.{os.getpid()}.{threading.get_ident()}")
            fresh.write_text(text)
            os.replace(fresh, record)

    @property
    def _notes(self) -> Path:
        return self.folder / ".cache" / "suzuri"

    def _record(self, file: HubFile) -> Path:
        return self._notes / f"{hashlib.sha256(file.name.encode()).hexdigest()[:32]}.json"


def free_bytes(place: Path) -> int:
    """Free bytes of the file system where `place` is or will be."""
    there = place.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def size_of(path: Path) -> int:
    """Bytes of a file; 0 when it is not there."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def has_digest(path: Path, file: HubFile, stop: Callable[[], bool]) -> bool:
    """Whether a file's contents have the hash that the hub lists. Raises Stopped when told to."""
    if len(file.digest) == 64:
        state = hashlib.sha256()
    else:
        state = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(HASH_PIECE):
            if stop():
                raise Stopped
            state.update(piece)
    return state.hexdigest() == file.digest


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False
