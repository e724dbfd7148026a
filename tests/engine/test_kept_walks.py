"""What a walk found serves later starts: all of it, and only where it is valid."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from suzuri.engine import kept_walks, preparation
from suzuri.engine.compilation import Outcome
from suzuri.engine.launches import Launches, Specialization
from suzuri.engine.preparation import Preparation
from suzuri.kernels.cache_folder import kept_file
from tests.engine.apart import run_apart
from tests.engine.rehearsed import SMALL, gpu_engine
from tests.engine.test_preparation import Compiler
from tests.kernels.pretend_gpu import GPU

PRINT: dict[str, object] = {"gpu": "this one"}
KERNEL = Specialization("suzuri.kernels.swiglu.kernel", "_swiglu", "{}")


def test_what_is_read_is_what_another_walk_finds(tmp_path: Path) -> None:
    """As Triton tells kernels apart, which the interpreter does not. Other pools are no reason to
    walk again, and find the same; other limits are."""
    said = json.loads(run_apart("kept", XDG_CACHE_HOME=str(tmp_path)))
    assert {name: (one["kept"], one["alike"]) for name, one in said.items()} == {
        "first": (False, False),
        "other pools": (True, True),
        "other limit": (False, False),
    }
    for one in said.values():
        assert one["kernels"] > 20 and one["read"] and one["callable"]
    assert len(list((tmp_path / "suzuri" / "walks").iterdir())) == 2


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one kernel and one product, which `read` takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The interpreter has other functions in place of Triton's.
    monkeypatch.setattr(kept_walks, "JITFunction", object)
    kept_walks.write(PRINT, ([KERNEL], [(2, 3, torch.bfloat16, torch.float32)]))
    found = kept_file(kept_walks.FOLDER, PRINT)
    assert found is not None and kept_walks.read(PRINT) is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": {"gpu": "another"}},
        {"kernels": None},
        {"kernels": [["suzuri.kernels.swiglu.kernel", "_swiglu"]]},
        {"kernels": [["suzuri.kernels.swiglu.kernel", "no_such", "{}"]]},
        {"kernels": [["suzuri.no_such", "_swiglu", "{}"]]},
        {"kernels": [["os", "system", "{}"]]},
        {"kernels": [["suzuri.kernels.swiglu.kernel", 5, "{}"]]},
        {"shapes": [[2, 3, "bfloat16", "manual_seed"]]},
        {"shapes": [[2, 3, "bfloat16", "no_such"]]},
        {"shapes": [[2, "3", "bfloat16", "float32"]]},
    ],
    ids=str,
)
def test_a_foreign_file_is_not_believed(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert kept_walks.read(PRINT) is None


def test_a_torn_file_is_not_believed(file: Path) -> None:
    file.write_text(file.read_text()[:-9])
    assert kept_walks.read(PRINT) is None
    file.write_text("[" * 200_000)  # deeper than a parser goes
    assert kept_walks.read(PRINT) is None
    file.unlink()
    assert kept_walks.read(PRINT) is None


def test_what_is_no_kernel_is_not_believed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_walks, "JITFunction", JITFunction)
    entry = ["suzuri.engine.kept_walks", "write", "{}"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kernels": [entry]}))
    assert kept_walks.read(PRINT) is None


def test_the_files_used_last_are_kept(file: Path) -> None:
    others: list[dict[str, object]] = [{"gpu": i} for i in range(kept_walks.MOST + 3)]
    for i, other in enumerate(others):
        kept_walks.write(other, ([], []))
        path = kept_file(kept_walks.FOLDER, other)
        assert path is not None
        os.utime(path, (1000 + i, 1000 + i))
        os.utime(file, (500, 500))
        assert kept_walks.read(PRINT) is not None  # used, and so it stays
    assert len(list(file.parent.iterdir())) == kept_walks.MOST
    assert [kept_walks.read(other) is None for other in others[:5]] == [True] * 4 + [False]


def test_writers_at_the_same_time_tear_nothing(file: Path) -> None:
    """Of one process, and so with one pid, as those of two containers may have."""
    found = kept_walks.read(PRINT)
    assert found is not None

    def write() -> None:
        for _ in range(100):
            kept_walks.write(PRINT, found)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert kept_walks.read(PRINT) == found
    assert [*file.parent.iterdir()] == [file]


def test_where_nothing_can_be_written_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    kept_walks.write(PRINT, ([KERNEL], []))
    assert kept_walks.read(PRINT) is None


def test_what_is_half_written_does_not_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full keeps what was there, and no remains."""
    before = file.read_text()

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "replace", full)
    kept_walks.write(PRINT, ([], []))
    assert [*file.parent.iterdir()] == [file] and file.read_text() == before


class Kept:
    """Stands for the disk and the walk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: kept_walks.Found | None = None
        self.walks = 0
        self.problems: dict[str, str] = {}
        monkeypatch.setattr(kept_walks, "fingerprint", lambda *_: PRINT)
        monkeypatch.setattr(kept_walks, "read", lambda print_: self.found)
        monkeypatch.setattr(kept_walks, "write", self._write)
        monkeypatch.setattr(preparation, "walk", self._walk)
        monkeypatch.setattr(preparation, "Compiler", Compiler)
        monkeypatch.setattr(preparation, "load", lambda *_: Outcome())

    def _write(self, print_: dict[str, object], found: kept_walks.Found) -> None:
        assert print_ == PRINT
        self.found = found

    def _walk(self, *_: Any) -> tuple[Launches, list[Any]]:
        self.walks += 1
        found = Launches()
        found.kernels[KERNEL] = None
        found.problems = self.problems
        return found, []

    def prepare(self) -> preparation.Prepared:
        with gpu_engine(torch.float32, **SMALL) as engine:
            engine.runner.device = GPU
            return Preparation().prepare(engine, has_weights=False)


def test_a_later_start_does_not_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Kept(monkeypatch)
    for _ in range(3):
        done = subject.prepare()
        assert done.kernels == 1 and not done.problems
    assert subject.walks == 1


def test_a_walk_with_problems_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Kept(monkeypatch)
    subject.problems = {"one": "cannot be bound"}
    for _ in range(2):
        assert subject.prepare().problems == ["one: cannot be bound"]
    assert subject.walks == 2


def test_without_a_fingerprint_every_start_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> dict[str, object]:
        raise RuntimeError("another Triton")

    subject = Kept(monkeypatch)
    monkeypatch.setattr(kept_walks, "fingerprint", broken)
    for _ in range(2):
        done = subject.prepare()
        assert done.kernels == 1 and not done.problems
    assert subject.walks == 2 and subject.found is None
