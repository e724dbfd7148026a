"""Where things that can always be made again are kept between runs, and how a file of them is read
and written."""

import contextlib
import hashlib
import json
import os
import uuid
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """$XDG_CACHE_HOME or ~/.cache, suzuri/`name`; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "suzuri" / name
    except RuntimeError:
        return None


def kept_file(name: str, fingerprint: dict[str, object]) -> Path | None:
    """The file in folder `name` for what `fingerprint` describes."""
    place = cache_folder(name)
    text = json.dumps(fingerprint, sort_keys=True)
    return place / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json" if place else None


def read_kept(path: Path | None) -> object:
    """What JSON in a file says; None for a file that is absent or torn."""
    try:
        return json.loads(path.read_text("utf-8")) if path else None
    except (OSError, ValueError, RecursionError):
        return None


def of_fingerprint(content: object, fingerprint: dict[str, object]) -> dict[str, object] | None:
    """A file's content, if it is of exactly this fingerprint."""
    if not isinstance(content, dict) or content.get("fingerprint") != fingerprint:
        return None
    return content


def write_kept(path: Path | None, fingerprint: dict[str, object], **content: object) -> None:
    """Where it cannot be written, the next process does without."""
    if path is not None:
        text = json.dumps({"fingerprint": fingerprint, **content}, indent=1)
        with contextlib.suppress(OSError):
            write_whole(path, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in its place at once: no reader sees half of it, whoever else writes it at the
    same time. OSError, and no remains, where it cannot be written."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
