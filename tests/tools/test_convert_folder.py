"""`suzuri convert` when it is stopped, when the disk is full, and when others are in its way."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from suzuri.model.checkpoint_files import scan
from suzuri.tools import convert as convert_command
from suzuri.tools.convert_folder import RECORD, copy_file
from tests.model.checkpoints import BASE, GOLDEN, MAIN, assert_same_bits, read_tensors
from tests.tools.conversions import (
    SMALL_SHARDS,
    at_write,
    convert,
    file_bytes,
    marks,
    partial,
    refused,
    run,
)

NVFP4 = ("--layout", "transformers", "--experts", "nvfp4", *SMALL_SHARDS)
KILLED = """
import os, signal, sys
from suzuri.cli import main
write, count = os.pwrite, 0
def watched(file, data, at):
    global count
    count += 1
    if count == int(sys.argv[1]):
        write(file, data[: len(data) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(file, data, at)
os.pwrite = watched
main(["convert", *sys.argv[2:]])
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(BASE, tmp_path / "source"))


def stop(monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, *words: str) -> None:
    """Leave a conversion half-way, some shards complete."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        at_write(patched, 150, interrupt)
        assert run(source, target, *words) == 130
    assert len(marks(partial(target))) > 1 and not target.exists()


# Stopped and taken up again.


@pytest.mark.parametrize("write", [1, 2, 60, 190])
def test_killed_at_any_write_it_goes_on(tmp_path: Path, write: int) -> None:
    """Complete shards are kept as they are; the result is that of one run."""
    at_once = convert(BASE, tmp_path / "at_once", *NVFP4)
    target = tmp_path / "out"
    words = [sys.executable, "-c", KILLED, str(write), str(BASE), str(target), *NVFP4]
    killed = subprocess.run(words, capture_output=True, check=False, cwd=Path.cwd())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    before = marks(partial(target))
    making = list(partial(target).glob("*.part"))
    assert len(making) == 1 and not (partial(target) / making[0].stem).exists()
    assert bool(before) == (write > 2)
    convert(BASE, target, *NVFP4)
    after = marks(target)
    assert {name: after[name] for name in before} == before and len(after) > len(before)
    assert file_bytes(target) == file_bytes(at_once)


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    stop(monkeypatch, BASE, target, *SMALL_SHARDS)
    out, err = capsys.readouterr()
    assert f"stopped; {partial(target)} keeps the shards that are complete" in out
    assert "The same command (without --restart) goes on" in out and "interrupted" in err
    count = len(marks(partial(target)))
    convert(BASE, target, *SMALL_SHARDS)
    assert f"going on: {count} of " in capsys.readouterr().out


def test_a_fault_of_the_source_is_not_said_to_go_away(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command would only meet it again."""
    with (source / MAIN).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xc0\x7f")
    assert run(source, tmp_path / "out", *SMALL_SHARDS) == 2
    out, err = capsys.readouterr()
    assert f"stopped; {partial(tmp_path / 'out')} keeps the shards that are complete. Remove" in out
    assert "same command" not in out and "holds nan" in err


def test_a_full_disk_is_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        at_write(patched, 150, full)
        assert run(BASE, tmp_path / "out", *SMALL_SHARDS) == 2
    assert "The same command (without --restart) goes on" in capsys.readouterr().out
    convert(BASE, tmp_path / "out", *SMALL_SHARDS)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def rename_a_tensor(file: Path) -> None:
    with file.open("r+b") as opened:
        data = opened.read(4096)
        at = data.index(b"model.llm.")
        opened.seek(at)
        opened.write(b"MODEL")


@pytest.mark.parametrize("damage", [shorten, rename_a_tensor])
def test_a_damaged_shard_of_an_earlier_run_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    target = tmp_path / "out"
    stop(monkeypatch, BASE, target, *SMALL_SHARDS)
    before = marks(partial(target))
    first = min(before)
    damage(partial(target) / first)
    convert(BASE, target, *SMALL_SHARDS)
    assert_same_bits(read_tensors(target), read_tensors(BASE))
    kept = before.keys() - {first}
    assert {name: marks(target)[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-shard-gb", "0.0003"), "with other settings (not the same: shards)"),
        (
            (*SMALL_SHARDS, "--layout", "transformers"),
            "with other settings (not the same: storage, shards)",
        ),
        (
            (*SMALL_SHARDS, "--experts", "nvfp4"),
            "with other settings (not the same: config, storage, shards)",
        ),
        ((*SMALL_SHARDS, "--no-mtp"), "with other settings (not the same: config, shards)"),
    ],
)
def test_other_settings_do_not_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    target = tmp_path / "out"
    stop(monkeypatch, BASE, target, *SMALL_SHARDS)
    before = file_bytes(partial(target))
    error = refused(capsys, BASE, target, *words)
    assert message in error and "--restart" in error and str(partial(target)) in error
    assert file_bytes(partial(target)) == before
    convert(BASE, target, *words, "--restart")
    assert file_bytes(target) == file_bytes(convert(BASE, tmp_path / "at_once", *words))


def test_another_version_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its quantiser may choose other codes."""
    stop(monkeypatch, BASE, tmp_path / "out", *SMALL_SHARDS)
    monkeypatch.setattr("suzuri.tools.convert.__version__", "99")
    error = refused(capsys, BASE, tmp_path / "out", *SMALL_SHARDS)
    assert "with other settings (not the same: suzuri version)" in error


def test_a_changed_source_does_not_go_on(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "out"
    stop(monkeypatch, source, target, *SMALL_SHARDS)
    moved = source.rename(tmp_path / "moved")
    os.utime(moved / MAIN, ns=(1, 1))
    error = refused(capsys, moved, target, *SMALL_SHARDS)
    assert "of another source, or of a source that has changed since" in error
    convert(moved, target, *SMALL_SHARDS, "--restart")
    assert_same_bits(read_tensors(target), read_tensors(BASE))


def test_a_moved_source_goes_on(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    stop(monkeypatch, source, target, *SMALL_SHARDS)
    before = marks(partial(target))
    convert(source.rename(tmp_path / "moved"), target, *SMALL_SHARDS)
    assert before.items() <= marks(target).items()


def test_stopped_between_folder_and_record(tmp_path: Path) -> None:
    partial(tmp_path / "out").mkdir()
    convert(BASE, tmp_path / "out")
    partial(tmp_path / "second").mkdir()
    (partial(tmp_path / "second") / RECORD).touch()
    convert(BASE, tmp_path / "second")


def test_a_folder_of_somebody_else_is_never_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    partial(target).mkdir()
    (partial(target) / "thesis.txt").write_text("years of work")
    error = refused(capsys, BASE, target, "--restart")
    assert "is no unfinished conversion" in error
    assert file_bytes(partial(target)) == {"thesis.txt": b"years of work"}


# Others at the same time.


def test_a_record_that_is_a_pipe_is_never_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial(tmp_path / "out").mkdir()
    os.mkfifo(partial(tmp_path / "out") / RECORD)
    error = refused(capsys, BASE, tmp_path / "out")
    assert "is in the way and is no unfinished conversion" in error


def test_the_second_of_two_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the destination does not appear before it is complete."""
    target = tmp_path / "out"
    words = [sys.executable, "-m", "suzuri.cli", "convert", str(BASE), str(target), *SMALL_SHARDS]
    seen: list[subprocess.CompletedProcess[str]] = []

    def meanwhile() -> None:
        before = marks(partial(target))
        assert before and not target.exists()
        for more in ((), ("--restart",)):
            run = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
            seen.append(run)
        assert marks(partial(target)) == before and not target.exists()

    with monkeypatch.context() as patched:
        at_write(patched, 150, meanwhile)
        convert(BASE, target, *SMALL_SHARDS)
    for second in seen:
        assert second.returncode == 2
        assert f"{partial(target)} is being written by another process" in second.stderr
    assert len(seen) == 2
    assert_same_bits(read_tensors(target), read_tensors(BASE))


def test_another_process_that_finished_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    real = convert_command.check_room

    def meanwhile(*arguments: object) -> None:
        monkeypatch.setattr(convert_command, "check_room", real)
        convert(BASE, target)

    monkeypatch.setattr(convert_command, "check_room", meanwhile)
    error = refused(capsys, BASE, target)
    assert "exists and is not an empty folder" in error
    assert_same_bits(read_tensors(target), read_tensors(BASE))
    assert not partial(target).exists()


def test_without_locks_it_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    convert(BASE, tmp_path / "out")
    assert "this file system has no locks" in capsys.readouterr().err


def test_a_destination_that_appears_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finished work stays, and gets its name in the next run without being written again."""
    target = tmp_path / "out"

    def meanwhile() -> None:
        target.mkdir()
        (target / "x").touch()

    with monkeypatch.context() as patched:
        at_write(patched, 150, meanwhile)
        error = refused(capsys, BASE, target, *SMALL_SHARDS)
    assert "the conversion is complete, but" in error and str(partial(target)) in error
    before = marks(partial(target))
    shutil.rmtree(target)
    writes = at_write(monkeypatch, 0, lambda: None)
    convert(BASE, target, *SMALL_SHARDS)
    assert writes == [] and marks(target) == before


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def cut(file: Path) -> None:
    os.truncate(file, 400_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (touch, "has changed while it was read"),
        (cut, "the file became shorter while it was read"),
        (Path.unlink, "cannot be found any more"),
    ],
)
def test_a_source_that_changes_while_it_is_read(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
) -> None:
    before: dict[str, tuple[int, int]] = {}

    def meanwhile() -> None:
        before.update(marks(partial(tmp_path / "out")))
        change(source / MAIN)

    at_write(monkeypatch, 60, meanwhile)
    error = refused(capsys, source, tmp_path / "out", *SMALL_SHARDS)
    assert str(source / MAIN) in error and message in error
    # The shard that was being written did not get its name.
    assert before and marks(partial(tmp_path / "out")) == before
    assert not (tmp_path / "out").exists()


# Places.


def test_destinations_that_cannot_be(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(source)
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "full", "source", "link"):
        error = refused(capsys, source, tmp_path / name)
        assert "exists and is not an empty folder" in error, name
    for place in ("source/new", "source/a/b", "link/new", "source/../source/new"):
        error = refused(capsys, source, tmp_path / place)
        assert "is inside the source" in error, place
    error = refused(capsys, source, tmp_path / "file" / "below")
    assert "cannot be written: Not a directory" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_destinations_that_can_be(tmp_path: Path) -> None:
    """An empty folder, a link to one, a link to nothing yet, new folders in new folders."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "new link").symlink_to(tmp_path / "nothing yet")
    for name in ("empty", "link", "new link", "a/b/c with späce"):
        convert(GOLDEN / "odd" / "original", tmp_path / name)
        scan(tmp_path / name)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "nothing yet").is_dir()
    assert not list(tmp_path.rglob(f"*{RECORD}"))


def test_a_mount_point_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "out")
    assert "is a mount point; give a folder inside it" in refused(capsys, BASE, tmp_path / "out")
    convert(BASE, tmp_path / "out" / "inside")


def test_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(self: Path, *args: object, **words: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    error = refused(capsys, BASE, tmp_path / "out")
    assert f"{partial(tmp_path / 'out')} cannot be written: Read-only file system" in error


# Room.


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=count))


def test_too_little_room_is_known_before_a_byte_is_written(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source / "tokenizer.json").write_bytes(bytes(500_000))
    plain = convert(BASE, tmp_path / "plain")
    needed = sum(file.stat().st_size for file in plain.glob("*.safetensors")) + 500_000
    target = tmp_path / "new" / "out"
    free(monkeypatch, needed - 1)
    error = refused(capsys, source, target)
    assert f"{needed / 1e9:.3f} GB are needed and {(needed - 1) / 1e9:.3f} GB are free" in error
    assert not (tmp_path / "new").exists()
    free(monkeypatch, needed)
    convert(source, target)


def test_room_counts_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Complete shards at their size; the one in the making at what it takes, not its length."""
    target = tmp_path / "out"
    stop(monkeypatch, BASE, target, *SMALL_SHARDS)
    at_once = convert(BASE, tmp_path / "at_once", *SMALL_SHARDS)
    needed = sum(file.stat().st_size for file in at_once.glob("*.safetensors"))
    needed -= sum(file.stat().st_size for file in partial(target).glob("*.safetensors"))
    (making,) = partial(target).glob("*.part")
    os.truncate(making, 10_000_000)
    needed -= making.stat().st_blocks * 512
    assert 0 < needed < 2_000_000
    free(monkeypatch, needed - 1)
    assert "GB are needed and" in refused(capsys, BASE, target, *SMALL_SHARDS)
    free(monkeypatch, needed)
    convert(BASE, target, *SMALL_SHARDS)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "truncate"])
def test_a_disk_that_fills_up_is_named_and_the_work_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: str,
) -> None:
    real = getattr(os, call)
    seen: list[int] = []

    def full(*args: object) -> object:
        seen.append(1)
        if marks(partial(tmp_path / "out")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        error = refused(capsys, BASE, tmp_path / "out", *SMALL_SHARDS)
    assert "No space left on device" in error and "model-00002-of-" in error
    before = marks(partial(tmp_path / "out"))
    assert len(before) == 1
    convert(BASE, tmp_path / "out", *SMALL_SHARDS)
    assert before.items() <= marks(tmp_path / "out").items()


def test_copying_replaces_a_read_only_copy_of_an_earlier_run(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("new")
    source.chmod(0o444)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / source.name).write_text("old")
    (folder / source.name).chmod(0o444)
    copy_file(source, folder)
    assert file_bytes(folder) == {"tokenizer.json": b"new"}
    assert os.access(folder / source.name, os.W_OK)
