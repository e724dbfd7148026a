"""Where things that can always be made again are kept between runs, and how a file of them is read
and written."""

import contextlib
import hashlib
import json
import os
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


def read_kept(path: Path | None, fingerprint: dict[str, object]) -> dict[str, object] | None:
    """What was kept for exactly this fingerprint; None for a file that is absent, torn or
    foreign."""
    try:
        content = json.loads(path.read_text("utf-8")) if path else None
    except (OSError, ValueError):
        return None
    return of_fingerprint(content, fingerprint)


def of_fingerprint(content: object, fingerprint: dict[str, object]) -> dict[str, object] | None:
    """A file's content, if it is of this fingerprint."""
    if not isinstance(content, dict) or content.get("fingerprint") != fingerprint:
        return None
    return content


def write_kept(path: Path | None, fingerprint: dict[str, object], **content: object) -> None:
    """Replaces the file at once, so that no reader sees half of it. Where it cannot be written, the
    next process does without."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"fingerprint": fingerprint, **content}, indent=1), "utf-8")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
