"""`suzuri convert` run in this process, for its tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from suzuri.cli import main

SMALL_SHARDS = ("--max-shard-gb", "0.0002")
"""Makes some ten shards of the golden case `base`."""


def run(source: object, target: object, *words: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), str(target), *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def convert(source: object, target: Path, *words: str) -> Path:
    """The new folder."""
    assert run(source, target, *words) == 0
    assert not partial(target).exists()
    return target


def refused(capsys: pytest.CaptureFixture[str], source: object, target: object, *words: str) -> str:
    """The error, after a refusal."""
    capsys.readouterr()
    assert run(source, target, *words) == 2
    return capsys.readouterr().err


def partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def at_write(
    monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]
) -> list[int]:
    """Does something before the `number`th write of weights; returns a list of the writes."""
    write = os.pwrite
    seen: list[int] = []

    def watched(file: int, data: bytes, at: int) -> int:
        seen.append(len(data))
        if len(seen) == number:
            action()
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", watched)
    return seen


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def marks(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each complete shard."""
    stats = {file.name: file.stat() for file in folder.glob("*.safetensors")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}
