"""The folder that `suzuri convert` fills: claimed, checked, and given its name when it is whole.

It is `.NAME.partial` beside the destination, with a record of what it is a conversion of. Only the
process that holds the record's lock writes there.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path

from suzuri.log import get_logger
from suzuri.model.checkpoint_writer import (
    PARTIAL_SUFFIX,
    FolderPlan,
    complete_shards,
    settle,
    sync_folder,
)
from suzuri.model.config_file import SIDE_FILE
from suzuri.model.weights import new_folder

log = get_logger(__name__)

RECORD = "suzuri-convert.json"
"""In an unfinished folder: what it is a conversion of."""
WRITTEN_ANEW = ("config.json", SIDE_FILE, RECORD)
READ_WEIGHTS = (".safetensors", ".safetensors.index.json")
OTHER_WEIGHTS = (
    *(".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack"),
    *(".onnx", ".tar", ".zip", PARTIAL_SUFFIX, ".incomplete"),
)
COPY_BYTES = 1 << 20


def destination(path: Path, source: Path | None) -> Path:
    """The folder to write, links followed. ValueError where none can be made, with the reason."""
    target = new_folder(path)
    if source is not None and target.is_relative_to(source.resolve()):
        raise ValueError(f"{target} is inside the source {source}; give another place")
    if os.path.ismount(target):
        # The unfinished folder is made beside it, so on another file system.
        raise ValueError(f"{target} is a mount point; give a folder inside it")
    return target


def partial_folder(target: Path) -> Path:
    """Where a conversion to `target` is written until it is whole."""
    return target.with_name(f".{target.name}.partial")


def check_room(target: Path, plan: FolderPlan, other_bytes: int) -> None:
    """ValueError with both figures when the disk has no place for what is still to be written."""
    partial = partial_folder(target)
    needed = other_bytes + sum(
        len(plan.header(name)) + plan.shard_bytes(name) for name in plan.shards
    )
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for file in os.scandir(partial):
            if file.name == RECORD:
                continue
            stat = file.stat()
            # A shard in the making has its full size at once, but not yet the room.
            is_making = file.name.endswith(PARTIAL_SUFFIX)
            needed -= stat.st_blocks * 512 if is_making else stat.st_size
    place = partial
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{target.parent}: {needed / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB are free; "
            "make room or give another destination"
        )


@contextlib.contextmanager
def claimed(target: Path, record: Mapping[str, object], *, restart: bool) -> Generator[Path]:
    """The folder to fill for `target`: a new one, or that of the same conversion, interrupted.

    `record` tells conversions apart; what differs is named. Locked against other processes while
    the context lasts. With `restart` what is there is dropped. Raises ValueError.
    """
    partial = partial_folder(target)
    is_foreign = partial.is_dir() and not (partial / RECORD).is_file() and any(partial.iterdir())
    if is_foreign or (partial.exists() and not partial.is_dir()):
        raise ValueError(
            f"{partial} is in the way and is no unfinished conversion; move it, or give another "
            "destination"
        )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        # Writable, because network file systems lock nothing else.
        descriptor = os.open(partial / RECORD, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(
            f"{partial} cannot be written: {error.strerror}; give another destination"
        ) from error
    with open(descriptor, "r+", encoding="utf-8") as file:
        _lock(file.fileno(), partial)
        _check_still_free(target, partial)
        text = json.dumps(record)
        held = file.read()
        if held and held != text and not restart:
            raise ValueError(
                f"{partial} is an unfinished conversion {_difference(held, record)}; give "
                "--restart to drop it, or another destination"
            )
        if held != text or restart:
            _drop_contents(partial)
            file.seek(0)
            file.truncate()
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield partial


def _check_still_free(target: Path, partial: Path) -> None:
    """Another process may have finished just now; then nothing of ours stays."""
    try:
        new_folder(target)
    except ValueError:
        if os.listdir(partial) == [RECORD] and not (partial / RECORD).stat().st_size:
            (partial / RECORD).unlink()
            partial.rmdir()
        raise


def _lock(descriptor: int, partial: Path) -> None:
    busy = f"{partial} is being written by another process; wait for it or end it"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ValueError(busy) from None
        log.warning(
            "%s: this file system has no locks (%s); see to it that no other process converts to "
            "the same destination",
            partial,
            error.strerror,
        )
    try:
        is_same = os.path.samestat(os.fstat(descriptor), (partial / RECORD).stat())
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise ValueError(busy)


def _difference(held: str, record: Mapping[str, object]) -> str:
    try:
        document = json.loads(held)
        names = [name for name in record if document.get(name) != record[name]]
    except (ValueError, AttributeError):
        return "with a damaged record"
    if "source" in names:
        return "of another source, or of a source that has changed since"
    return f"with other settings (not the same: {', '.join(names)})"


def _drop_contents(partial: Path) -> None:
    for file in partial.iterdir():
        if file.name == RECORD:
            continue
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()


def other_files(folder: Path | None) -> tuple[list[Path], list[str]]:
    """(files that go along, names of what does not): tokenizer, chat template and licence do, other
    weight formats, folders and hidden files do not; hidden ones are not named."""
    along, left = list[Path](), list[str]()
    for file in sorted(folder.iterdir()) if folder is not None else ():
        name = file.name
        if name in WRITTEN_ANEW or name.startswith(".") or name.endswith(READ_WEIGHTS):
            continue
        if file.is_file() and not name.endswith(OTHER_WEIGHTS):
            along.append(file)
        else:
            left.append(name + "/" * file.is_dir())
    return along, left


def copy_file(source: Path, folder: Path) -> None:
    """Contents alone: modes and owners of another machine often cannot be set."""
    making = folder / (source.name + PARTIAL_SUFFIX)
    with source.open("rb") as file, making.open("wb") as copy:
        shutil.copyfileobj(file, copy, COPY_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
    making.replace(folder / source.name)


def finish(partial: Path, target: Path, plan: FolderPlan) -> None:
    """Give the filled folder its name. The record goes last, so that a fault leaves it."""
    assert complete_shards(partial, plan) == plan.shards.keys(), f"{partial}: shards are missing"
    sync_folder(partial)
    try:
        settle(partial, target)
    except OSError as error:
        raise ValueError(
            f"the conversion is complete, but {partial} cannot be renamed to {target}: "
            f"{error.strerror}; move away what is there and run the same command again"
        ) from error
    (target / RECORD).unlink(missing_ok=True)
