"""Loads a checkpoint into a model and writes it back, both along tensor_table.table.

Loading reads a shard front to back in small pieces; exporting writes the released layout into a
new folder that appears whole or not at all.
"""

import collections
import dataclasses
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import (
    INDEX_SUFFIX,
    Checkpoint,
    CheckpointError,
    TensorEntry,
    encode_header,
    scan,
)
from suzuri.model.config import WEIGHT_DTYPES, ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.model.reconcile import LoadPlan, reconcile
from suzuri.model.tensor_table import BYTES_PER_VALUE, Entry, table

log = get_logger(__name__)

CHUNK_BYTES = 32 << 20
"""Host memory that loading and exporting use beyond the model itself."""
SHARD_BYTES = 5 << 30
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
PART_MODULES = {"vision": "vision", "audio": "audio", "mtp": "draft"}

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_weights` did. `notes` are sentences for the user.

    `parts` are now in the model ("text" and optional ones), `skipped` ones are in the files but
    were not wanted or not configured, `absent` ones were wanted and configured but not in the
    files.
    """

    parts: frozenset[str]
    skipped: tuple[str, ...]
    absent: tuple[str, ...]
    mtp_depths: int
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def load_weights(
    model: Inkling,
    directory: str | Path,
    *,
    want: frozenset[str],
    progress: Progress | None = None,
) -> LoadReport:
    """Fill every parameter of `model` from a folder in the released layout.

    `want` names the optional parts to load: "vision", "audio", "mtp". Afterwards the model holds
    exactly what was loaded: a tower or draft that was not is set to None, and draft depths that
    the files lack are cut off. Values are converted from the stored dtype to the parameter's, on
    whatever device that is. `progress(done, total)` is called in bytes.

    Raises CheckpointError, before a tensor is read or the model is changed, listing every file and
    tensor at fault, and ValueError for a wanted part that the model was built without.
    """
    checkpoint = scan(directory)
    plan = reconcile(model.config, checkpoint, want)
    _check_built(model, plan)
    _drop_unloaded(model, plan)
    parameters = model.state_dict(keep_vars=True)
    _check_parameters(parameters, [entry for entry, _ in plan.reads])
    num_bytes = _copy_in(parameters, checkpoint, plan, progress)
    return LoadReport(
        parts=plan.parts,
        skipped=plan.skipped,
        absent=plan.absent,
        mtp_depths=plan.mtp_depths,
        num_tensors=len(plan.reads),
        num_bytes=num_bytes,
        notes=plan.notes,
    )


def _check_built(model: Inkling, plan: LoadPlan) -> None:
    for part in sorted(plan.parts - {"text"}):
        if getattr(model, PART_MODULES[part]) is None:
            raise ValueError(
                f"want has {part!r} and the checkpoint holds it, but the model was built without "
                f"it; build the model with its {PART_MODULES[part]} or leave {part!r} out"
            )
    if model.draft is not None and len(model.draft.depths) < plan.mtp_depths:
        raise ValueError(
            f"the checkpoint holds {plan.mtp_depths} draft depths, but an earlier load cut the "
            f"model to {len(model.draft.depths)}; build the model anew"
        )


def _drop_unloaded(model: Inkling, plan: LoadPlan) -> None:
    """A part without weights must not stay: it would run on whatever its memory held."""
    for part, name in PART_MODULES.items():
        if part not in plan.parts:
            setattr(model, name, None)
    if model.draft is not None:
        del model.draft.depths[plan.mtp_depths :]


def _check_parameters(parameters: dict[str, Tensor], entries: Iterable[Entry]) -> None:
    """The table and the model must agree, and each parameter be covered exactly once."""
    ends: dict[str, int] = collections.defaultdict(int)
    for entry in entries:
        parameter = parameters.get(entry.parameter)
        assert parameter is not None, f"the model has no parameter {entry.parameter}"
        shape = tuple(parameter.shape)
        assert shape == entry.parameter_shape, f"{entry.parameter}: {shape} is not the table's"
        assert not parameter.is_meta, f"{entry.parameter} has no memory; allocate the model first"
        assert ends[entry.parameter] == entry.start, f"{entry.parameter}: a hole or an overlap"
        ends[entry.parameter] = entry.stop
    left = [name for name in parameters if ends[name] != parameters[name].shape[0]]
    assert not left, f"parameters that the table does not cover: {left[:3]}"


def _copy_in(
    parameters: dict[str, Tensor],
    checkpoint: Checkpoint,
    plan: LoadPlan,
    progress: Progress | None,
) -> int:
    assert sys.byteorder == "little", "safetensors files are little-endian"
    by_file: dict[str, list[tuple[Entry, TensorEntry]]] = collections.defaultdict(list)
    for entry, tensor in plan.reads:
        by_file[tensor.file].append((entry, tensor))
    total = sum(tensor.nbytes for _, tensor in plan.reads)
    largest = max(tensor.nbytes for _, tensor in plan.reads)
    buffer = torch.empty(min(CHUNK_BYTES, largest), dtype=torch.uint8)
    written: dict[str, int] = collections.Counter()
    done = 0
    for file_name, reads in sorted(by_file.items()):
        path = checkpoint.directory / file_name
        log.debug("reading %d tensors from %s", len(reads), path)
        with path.open("rb", buffering=0) as file, torch.no_grad():
            for entry, tensor in sorted(reads, key=lambda read: read[1].start):
                file.seek(tensor.start)
                for target in _pieces(parameters[entry.parameter], entry):
                    size = target.numel() * BYTES_PER_VALUE[entry.dtype]
                    _fill(file, buffer[:size], f"{path}: {entry.name}")
                    target.copy_(buffer[:size].view(TORCH_DTYPES[entry.dtype]))
                    written[entry.parameter] += target.numel()
                    done += size
                    if progress is not None:
                        progress(done, total)
    wrong = [name for name, tensor in parameters.items() if written[name] != tensor.numel()]
    assert not wrong and done == total, f"not written exactly once: {wrong[:3]}"
    return done


def _pieces(parameter: Tensor, entry: Entry) -> Iterator[Tensor]:
    """Flat views, in file order, of what an entry holds, each at most CHUNK_BYTES in the file."""
    assert parameter.is_contiguous(), f"{entry.parameter} is not laid out row by row"
    flat = parameter.detach()[entry.start : entry.stop].view(-1)
    step = CHUNK_BYTES // BYTES_PER_VALUE[entry.dtype]
    for first in range(0, flat.numel(), step):
        yield flat[first : first + step]


def _fill(file: FileIO, buffer: Tensor, where: str) -> None:
    view = buffer.numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{where}: the file became shorter while it was read")
        view = view[count:]


def export_weights(
    model: Inkling,
    directory: str | Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
) -> Checkpoint:
    """Write config.json and the weights in the released layout to a new folder; return its scan.

    Parts that the model lacks are left out of the config too. Shards hold up to `max_shard_bytes`
    of tensor data, or one larger tensor. `dtype` "bfloat16" (round to nearest even) or "float32"
    chooses how weights are stored; None stores them as the config says and raises ValueError,
    naming the first tensor, when that would change a value. The router's bias and scale are always
    fp32. The folder appears under its name only when complete. ValueError if it holds anything.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be at least 1")
    target = Path(os.path.realpath(directory))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give a new one")
    parameters = model.state_dict(keep_vars=True)
    config = _held_config(model, dtype)
    entries = table(config)
    _check_parameters(parameters, entries)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        shards = _shards(entries, max_shard_bytes)
        for name, held in shards.items():
            _write_shard(partial / name, held, parameters, may_round=dtype is not None)
        _write_json(partial / "config.json", config.to_dict())
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
            "weight_map": {entry.name: name for name, held in shards.items() for entry in held},
        }
        _write_json(partial / f"model{INDEX_SUFFIX}", index)
        _sync_folder(partial)
        partial.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # there only if something above failed
    return scan(target)


def _held_config(model: Inkling, dtype: str | None) -> ModelConfig:
    """The model's config without the parts it does not hold, storing `dtype`."""
    config = model.config
    if dtype is not None:
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(WEIGHT_DTYPES)}")
        config = dataclasses.replace(
            config, text=dataclasses.replace(config.text, torch_dtype=dtype)
        )
    if model.vision is None:
        config = dataclasses.replace(config, vision=None)
    if model.audio is None:
        config = dataclasses.replace(config, audio=None)
    if model.draft is None:
        return dataclasses.replace(config, mtp=MtpConfig())
    depths = len(model.draft.depths)
    local = tuple(d for d in config.mtp.local_layer_ids if d < depths)
    mtp = dataclasses.replace(config.mtp, num_nextn_predict_layers=depths, local_layer_ids=local)
    return dataclasses.replace(config, mtp=mtp)


def _shards(entries: tuple[Entry, ...], max_bytes: int) -> dict[str, list[Entry]]:
    """File names and what each holds: the draft depths apart from the rest, as released."""
    main = _groups([entry for entry in entries if entry.part != "mtp"], max_bytes)
    draft = _groups([entry for entry in entries if entry.part == "mtp"], max_bytes)
    shards = {
        f"model-{i:05d}-of-{len(main):05d}.safetensors": group for i, group in enumerate(main, 1)
    }
    if len(draft) == 1:
        return {**shards, "mtp.safetensors": draft[0]}
    return shards | {
        f"mtp-{i:05d}-of-{len(draft):05d}.safetensors": group for i, group in enumerate(draft, 1)
    }


def _groups(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if entry.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(entry)
        room -= entry.num_bytes
    # Wider values first, so that each tensor lies aligned to its own value size.
    return [sorted(group, key=lambda entry: -BYTES_PER_VALUE[entry.dtype]) for group in groups]


def _write_shard(
    path: Path, entries: list[Entry], parameters: dict[str, Tensor], *, may_round: bool
) -> None:
    with path.open("wb") as file:
        file.write(encode_header((entry.name, entry.dtype, entry.shape) for entry in entries))
        for entry in entries:
            for values in _pieces(parameters[entry.parameter], entry):
                stored = _convert(values, entry, may_round=may_round)
                file.write(stored.view(torch.uint8).numpy().data)
        _sync(file)


def _convert(values: Tensor, entry: Entry, *, may_round: bool) -> Tensor:
    stored = values.to(TORCH_DTYPES[entry.dtype])
    if stored.dtype != values.dtype and not may_round:
        is_same = (stored.to(values.dtype) == values) | values.isnan()
        if not is_same.all():
            raise ValueError(
                f"{entry.parameter} holds {values[~is_same][0].item()!r}, which {entry.dtype} "
                f"cannot store exactly (for {entry.name}); give dtype='bfloat16' or 'float32' to "
                "round to nearest even"
            )
    return stored.cpu()


def _write_json(path: Path, document: object) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
