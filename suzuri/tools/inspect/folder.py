"""What lies in a model folder, damaged or not: files, tensors by their headers, every fault.

checkpoint_files.scan stops at the first fault of the files; this goes on and lists what it can.
Read next: parts.py.
"""

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any, cast

from suzuri.model.checkpoint_files import (
    BITS_PER_VALUE,
    CONFIG_FILE,
    INDEX_SUFFIX,
    MAX_HEADER_BYTES,
    Checkpoint,
    CheckpointError,
    TensorEntry,
    near_folders,
    read_header,
    scan,
)
from suzuri.model.config import ModelConfig
from suzuri.model.nvfp4_values import value_faults
from suzuri.model.reconcile import reconcile
from suzuri.model.tensor_names import OPTIONAL_PARTS, Layout, canonical, marks

MAX_COMPARED = 1 << 28
"""Bytes of doubled tensors that may be read to compare them; beyond that only their names count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of the folder. `state` says what loading does with a weight file; "" for others."""

    name: str
    num_bytes: int | None
    num_tensors: int = 0
    state: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A model folder as far as it can be read.

    `tensors` are those that loading would read, by canonical name (of `layout`), each once;
    `layout` is None where the names tell of none or of both. `config` is None where config.json is
    missing or refused. `faults` are all reasons why it would not load, `notes` what a loader says.
    """

    directory: Path
    files: tuple[StoredFile, ...]
    tensors: dict[str, TensorEntry]
    layout: Layout | None
    config: ModelConfig | None
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def read_folder(directory: Path) -> Folder:
    """Read every header and check the files against each other, the index and the config.

    Raises ValueError when the folder has neither a config.json nor weights, or cannot be listed.
    """
    names = _names(directory)
    weights = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if not weights and not indexes and CONFIG_FILE not in names:
        raise ValueError(_no_model(directory))
    faults: list[str] = []
    config = _read_config(directory, faults)
    listed = _listed_files(directory / indexes[0]) if len(indexes) == 1 else None
    headers, broken = _headers(directory, weights, faults)
    read = [name for name in weights if listed is None or name in listed]
    found = marks(name for file in read for name in headers[file])
    layout = next(iter(found)) if len(found) == 1 else None
    tensors: dict[str, TensorEntry] = {}
    doubled: list[TensorEntry] = []
    for file in read:
        for name, entry in headers[file].items():
            if tensors.setdefault(canonical(name, layout or "released"), entry) is not entry:
                doubled.append(entry)
    checkpoint = Checkpoint(
        directory=directory,
        layout=layout or "released",
        tensors=tensors,
        files=tuple(read),
        notes=(),
    )
    notes: list[str] = []
    if sum(entry.nbytes for entry in doubled) > MAX_COMPARED:
        notes.append(
            f"{len(doubled)} tensors are in two files, first {doubled[0].stored_name}; they are "
            "too large to compare here, loading does it"
        )
    else:
        checkpoint = _scan(directory, checkpoint, faults)
    for name in sorted(broken):
        if not any(name in fault for fault in faults):
            faults.append(f"{directory / name} is not a file that can be opened")
    notes += _check_tensors(config, checkpoint, faults)
    return Folder(
        directory=directory,
        files=tuple(_file(directory, name, headers, read, broken) for name in names),
        tensors=dict(checkpoint.tensors),
        layout=layout,
        config=config,
        faults=tuple(dict.fromkeys(faults)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _headers(
    directory: Path, weights: list[str], faults: list[str]
) -> tuple[dict[str, dict[str, TensorEntry]], set[str]]:
    """(tensors by file, files that are faulty)."""
    headers: dict[str, dict[str, TensorEntry]] = {}
    broken: set[str] = set()
    for name in weights:
        headers[name] = {}
        if not (directory / name).is_file():  # a broken link; opening a pipe would wait for ever
            broken.add(name)
            continue
        try:
            headers[name] = read_header(directory / name)
        except CheckpointError as error:
            faults.append(str(error))
            broken.add(name)
            headers[name] = _whatever_header(directory / name)
    return headers, broken


def _names(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if not (directory / name).is_dir())
    except NotADirectoryError as error:
        raise ValueError(
            f"{directory} is a file; give the model folder that holds it: {directory.parent}"
        ) from error
    except OSError as error:
        raise ValueError(f"{directory} cannot be listed: {error.strerror}") from error


def _no_model(directory: Path) -> str:
    """The words of the loader for a folder without weights."""
    try:
        scan(directory)
    except CheckpointError as error:
        if near_folders(directory):
            return str(error)
        return f"{error}, and no {CONFIG_FILE}; give a model folder"
    return f"{directory} is no model folder"


def _read_config(directory: Path, faults: list[str]) -> ModelConfig | None:
    if not (directory / CONFIG_FILE).exists() and (hint := near_folders(directory)):
        # A golden folder, say: its tensors are records, the checkpoints lie in it.
        faults.append(f"{directory} has no {CONFIG_FILE}{hint}")
        return None
    try:
        return ModelConfig.from_file(directory)
    except (ValueError, OSError) as error:
        faults.append(str(error))
        return None


def _listed_files(index: Path) -> set[str] | None:
    """The files that the index names; None where it cannot be read (scan says why)."""
    try:
        if not index.is_file():  # reading a pipe would wait for ever
            return None
        document: Any = json.loads(index.read_bytes())
        mapping = cast(dict[str, object], document["weight_map"])
        return {file for file in mapping.values() if isinstance(file, str)} or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _whatever_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a faulty file's header tells of, as far as it can be read at all."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                return {}
            document: Any = json.loads(file.read(length))
    except (OSError, ValueError, struct.error, RecursionError):
        return {}
    found: dict[str, TensorEntry] = {}
    items = cast(dict[str, Any], document).items() if isinstance(document, dict) else ()
    for name, spec in items:
        try:
            begin, end = (int(offset) for offset in spec["data_offsets"])
            shape = tuple(int(count) for count in spec["shape"])
            dtype = str(spec["dtype"])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if dtype in BITS_PER_VALUE and 0 <= begin <= end and all(count >= 0 for count in shape):
            found[name] = TensorEntry(
                file=path.name,
                dtype=dtype,
                shape=shape,
                start=8 + length + begin,
                nbytes=end - begin,
                stored_name=name,
            )
    return found


def _scan(directory: Path, fallback: Checkpoint, faults: list[str]) -> Checkpoint:
    """What the loader makes of the files; the fallback where it refuses them."""
    try:
        return scan(directory)
    except CheckpointError as error:
        if str(error) not in faults:
            faults.append(str(error))
        return fallback


def _check_tensors(
    config: ModelConfig | None, checkpoint: Checkpoint, faults: list[str]
) -> list[str]:
    """Adds what loading would find wrong with the tensors; returns what it would say."""
    if config is None or not checkpoint.tensors:
        return list(checkpoint.notes)
    try:
        plan = reconcile(config, checkpoint, frozenset(OPTIONAL_PARTS))
        values = value_faults(checkpoint.directory, plan.reads)
    except CheckpointError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        faults += lines[1:] or lines
        return list(checkpoint.notes)
    faults += values
    return list(plan.notes)


def _file(
    directory: Path,
    name: str,
    headers: dict[str, dict[str, TensorEntry]],
    read: list[str],
    broken: set[str],
) -> StoredFile:
    try:
        size = (directory / name).stat().st_size
    except OSError:
        size = None
    if name not in headers:
        return StoredFile(name=name, num_bytes=size)
    state = "faulty" if name in broken else "read"
    if name not in read:
        state = "left out: not in the index"
    return StoredFile(name=name, num_bytes=size, num_tensors=len(headers[name]), state=state)
