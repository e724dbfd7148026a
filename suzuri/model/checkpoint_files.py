"""What is in a checkpoint folder, read from safetensors headers and the index alone.

`scan` finds every fault of the files (cut, surplus, holed, missing, doubled) before a tensor is
touched, and names the file and the tensor. `encode_header` writes the other way. No torch here.
Read next: weights.py, which compares the result with the model's table.
"""

# pyright: strict

import dataclasses
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from suzuri.model.json_fields import parse_object
from suzuri.model.tensor_names import LAYOUTS, Layout, canonical, marks

CONFIG_FILE = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
COMPARE_BYTES = 1 << 20
MAX_LISTED = 20
"""Faults that one message spells out."""
BITS_PER_VALUE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
_LFS_POINTER = b"version "
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint's files cannot be used as they are; the message names file and tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies. `start` counts from the beginning of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    stored_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A scanned folder. `tensors` goes by the names that tensor_names.canonical gives."""

    directory: Path
    layout: Layout
    tensors: Mapping[str, TensorEntry]
    files: tuple[str, ...]
    notes: tuple[str, ...]


def scan(directory: str | Path) -> Checkpoint:
    """Read all headers of a model folder and check them against the file sizes and the index.

    With an index (`*.safetensors.index.json`) its files are read, and it must tell the truth: a
    file it names must be there, and each tensor must be where it says. A tensor that only an
    unlisted file has is an error; an unlisted file without any is left alone with a note. Without
    an index every *.safetensors file is read. Raises CheckpointError.
    """
    folder = Path(directory)
    present = _list_folder(folder)
    indexes = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder} has {len(indexes)} indexes: {', '.join(indexes)}; keep the one that counts"
        )
    shards = [name for name in present if name.endswith(".safetensors")]
    notes: list[str] = []
    if not indexes:
        if not shards:
            raise CheckpointError(_no_weights(folder, present))
        _check_shard_count(folder, shards)
        headers = {name: read_header(folder / name) for name in shards}
        layout = _layout(folder, headers)
        found = _merge(folder, headers, layout, {}, notes)
        return Checkpoint(
            directory=folder,
            layout=layout,
            tensors=found,
            files=tuple(shards),
            notes=tuple(notes),
        )
    index = indexes[0]
    listed = _read_index(folder, index)
    files = sorted(set(listed.values()))
    absent = [name for name in files if name not in shards]
    if absent:
        others = [name for name in shards if name not in files]
        seen = f"; the folder has {_some(others)}, which it does not name" if others else ""
        raise CheckpointError(
            f"{folder / index} names files that are not there: {_some(absent)}{seen}. Put them "
            "back, or delete the index if it is stale: without one the folder is read as it is"
        )
    headers = {name: read_header(folder / name) for name in files}
    layout = _layout(folder, headers)
    listed = _by_canonical_name(folder / index, listed, layout)
    found = _merge(folder, headers, layout, listed, notes)
    _check_listed(folder, index, listed, found)
    for name in shards:
        if name not in files:
            _check_unlisted(folder, index, name, layout, found)
            notes.append(f"{name} is not in {index} and was not read; the index covers its tensors")
    return Checkpoint(
        directory=folder, layout=layout, tensors=found, files=tuple(files), notes=tuple(notes)
    )


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file with these (name, dtype, shape), data in that order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * BITS_PER_VALUE[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by stored name, checked to fill the file exactly.

    Raises CheckpointError naming the file, and the tensor where one is at fault.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path} is cut off inside its header: it has {size} bytes and 8 start a file"
                )
            (length,) = struct.unpack("<Q", prefix)
            if prefix == _LFS_POINTER:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights; run git lfs pull"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is not a safetensors file: its header would be {length} bytes long, "
                    f"and the format allows {MAX_HEADER_BYTES}"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is cut off inside its header: {8 + length - size} bytes of it are "
                    "missing, and all the data after it"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = parse_object(text, f"{path} header")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, spec, 8 + length) for name, spec in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, spec: Any, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(spec, dict):
        raise CheckpointError(f"{where} has no description in the header")
    fields = cast(dict[str, Any], spec)
    dtype, shape = fields.get("dtype"), _counts(fields.get("shape"))
    offsets = _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS_PER_VALUE:
        raise CheckpointError(f"{where} has dtype {dtype!r}, which is not known")
    if shape is None:
        raise CheckpointError(f"{where} has shape {fields.get('shape')!r}, which is not a shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where} has data_offsets {fields.get('data_offsets')!r}, which are no byte range"
        )
    nbytes = offsets[1] - offsets[0]
    if nbytes * 8 != math.prod(shape) * BITS_PER_VALUE[dtype]:
        raise CheckpointError(
            f"{where} of {dtype} {list(shape)} is given {nbytes} bytes; "
            f"it takes {math.prod(shape) * BITS_PER_VALUE[dtype] / 8:g}"
        )
    return TensorEntry(
        file=path.name,
        dtype=dtype,
        shape=shape,
        start=data_start + offsets[0],
        nbytes=nbytes,
        stored_name=name,
    )


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    counts = [item for item in items if type(item) is int and 0 <= item < 1 << 62]
    return tuple(counts) if len(counts) == len(items) else None


def _check_layout(path: Path, tensors: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must follow each other without a gap from the header to the end of the file."""
    end, before = data_start, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {name!r} {fault} {before} ({abs(entry.start - end)} bytes)"
            )
        end, before = entry.start + entry.nbytes, f"tensor {name!r}"
    if size < end:
        cut = min(
            (entry for entry in tensors.values() if entry.start + entry.nbytes > size),
            key=lambda entry: entry.start,
        )
        raise CheckpointError(
            f"{path} is cut off: {end - size} bytes are missing, from inside tensor "
            f"{cut.stored_name!r} on; fetch the file again"
        )
    if size > end:
        raise CheckpointError(
            f"{path} has {size - end} surplus bytes after its last tensor; fetch the file again"
        )


def _list_folder(folder: Path) -> list[str]:
    """Sorted names; every weight file and index among them can be opened as a plain file."""
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
        names = sorted(os.listdir(folder)) if is_folder else []
    except FileNotFoundError as error:
        link = f" (a broken link to {os.readlink(folder)})" if folder.is_symlink() else ""
        raise CheckpointError(f"{folder}: no such folder{link}") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    if not is_folder:
        raise CheckpointError(f"{folder} is a file; give the model folder that holds it")
    for name in names:
        if name.endswith((".safetensors", INDEX_SUFFIX)):
            _check_file(folder / name)
    return names


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        target = f", a link to {os.readlink(path)}," if path.is_symlink() else ""
        reason = (
            "whose target is missing"
            if isinstance(error, FileNotFoundError)
            else (f"cannot be opened: {error.strerror}")
        )
        raise CheckpointError(f"{path}{target} {reason}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a plain file")


def _no_weights(folder: Path, present: list[str]) -> str:
    others = [name for name in present if name.endswith((".bin", ".pt", ".pth", ".gguf", ".npz"))]
    if others:
        return f"{folder} has no *.safetensors file; {_some(others)}: this format is not read"
    if hint := near_folders(folder):
        return f"{folder} has no *.safetensors file{hint}"
    below = [name for name in present if any((folder / name).glob("*.safetensors"))]
    hint = f"; did you mean {folder / below[0]}?" if below else ""
    return f"{folder} has no *.safetensors file{hint}"


def near_folders(folder: Path) -> str:
    """What may be meant by a folder that is no model folder: "; did you mean ...?" with the model
    folders in it or one level further down; "" when there are none."""
    found: list[Path] = []
    for pattern in (f"*/{CONFIG_FILE}", f"*/*/{CONFIG_FILE}"):
        try:
            found = found or sorted(path.parent for path in folder.glob(pattern))
        except OSError:
            return ""
    one = "one of " if len(found) > 1 else ""
    return f"; did you mean {one}{_some([str(path) for path in found])}?" if found else ""


def _check_shard_count(folder: Path, shards: list[str]) -> None:
    """Without an index, the names themselves tell how many shards there should be."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in shards:
        match = _SHARD_NAME.fullmatch(name)
        if match:
            series.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    for (stem, count), numbers in series.items():
        if int(count) > 100_000:
            raise CheckpointError(f"{folder}: {stem}-*-of-{count} are too many shards")
        missing = [i for i in range(1, int(count) + 1) if i not in numbers]
        if missing:
            names = [f"{stem}-{i:0{len(count)}d}-of-{count}.safetensors" for i in missing]
            raise CheckpointError(f"{folder} lacks {_some(names)}, and has no index")


def _read_index(folder: Path, index: str) -> dict[str, str]:
    """The index's map from stored tensor name to file name."""
    path = folder / index
    try:
        document = parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{path} has no weight_map from tensor names to files")
    listed: dict[str, str] = {}
    for name, file in cast(dict[str, object], mapping).items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name!r} is in {file!r}, not a *.safetensors file")
        if "/" in file or "\\" in file:
            raise CheckpointError(f"{path}: {name!r} is in {file!r}, outside the model folder")
        listed[name] = file
    for layout in LAYOUTS:
        _by_canonical_name(path, listed, layout)
    return listed


def _by_canonical_name(path: Path, mapping: Mapping[str, str], layout: Layout) -> dict[str, str]:
    listed: dict[str, str] = {}
    for name, file in mapping.items():
        if listed.setdefault(canonical(name, layout), file) != file:
            raise CheckpointError(f"{path} places {name!r} in two files")
    return listed


def _layout(folder: Path, headers: Mapping[str, Mapping[str, TensorEntry]]) -> Layout:
    """Whose names the tensors have; those of both layouts at once are refused."""
    found: dict[Layout, str] = {}
    for file, tensors in headers.items():
        for layout, name in marks(tensors).items():
            found.setdefault(layout, f"{name!r} in {file}")
    if len(found) == 2:
        raise CheckpointError(
            f"{folder} mixes two layouts: {found['released']} is of the released one, "
            f"{found['transformers']} of the transformers one; keep the files of one of them"
        )
    return "transformers" if "transformers" in found else "released"


def _merge(
    folder: Path,
    headers: Mapping[str, Mapping[str, TensorEntry]],
    layout: Layout,
    listed: Mapping[str, str],
    notes: list[str],
) -> dict[str, TensorEntry]:
    """All tensors of the files. One that is there twice must be the same twice."""
    found: dict[str, TensorEntry] = {}
    for file, tensors in headers.items():
        for stored_name, entry in tensors.items():
            name = canonical(stored_name, layout)
            other = found.get(name)
            if other is None:
                found[name] = entry
                continue
            if not _same(folder, entry, other):
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in {other.file} and in {entry.file} with "
                    "different contents; remove the file that is not of this checkpoint"
                )
            notes.append(f"{name} is in {other.file} and again, equal, in {entry.file}")
            if listed.get(name) == file:
                found[name] = entry
    return found


def _same(folder: Path, one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (folder / one.file).open("rb") as a, (folder / other.file).open("rb") as b:
        a.seek(one.start)
        b.seek(other.start)
        left = one.nbytes
        while left:
            size = min(left, COMPARE_BYTES)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True


def _check_listed(
    folder: Path, index: str, listed: Mapping[str, str], found: Mapping[str, TensorEntry]
) -> None:
    faults = [
        f"{name!r} should be in {file} and is "
        + (f"in {found[name].file}" if name in found else "nowhere")
        for name, file in listed.items()
        if name not in found or found[name].file != file
    ]
    faults += [
        f"{name!r} is in {entry.file} and is not listed"
        for name, entry in found.items()
        if name not in listed
    ]
    if faults:
        raise CheckpointError(
            f"{folder / index} contradicts the files: {_some(faults, '; ')}. Delete it if it is "
            "stale: without one the folder is read as it is"
        )


def _check_unlisted(
    folder: Path, index: str, file: str, layout: Layout, found: Mapping[str, TensorEntry]
) -> None:
    names = [canonical(name, layout) for name in read_header(folder / file)]
    extra = [name for name in names if name not in found]
    if extra:
        raise CheckpointError(
            f"{folder / index} omits {file}, which holds {_some([repr(name) for name in extra])}; "
            "remove that file if it is not of this checkpoint, or delete the index"
        )


def listing(subject: str, problems: list[str]) -> str:
    """A message with every problem on its own line, up to MAX_LISTED, and their count."""
    count = len(problems)
    lines = [f"{subject}: {count} problem(s)"]
    lines += [f"  {problem}" for problem in problems[:MAX_LISTED]]
    if count > MAX_LISTED:
        lines.append(f"  and {count - MAX_LISTED} more")
    return "\n".join(lines)


def _some(names: list[str], separator: str = ", ", limit: int = 3) -> str:
    shown = separator.join(names[:limit])
    return shown if len(names) <= limit else f"{shown}{separator}and {len(names) - limit} more"
