"""Writes a checkpoint folder from any source of weights, shard by shard.

`write_files` fills a folder that nobody reads yet; `settle` gives it its name in one step. Used by
weights.export_weights and by `suzuri convert`.
"""

# pyright: strict

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import INDEX_SUFFIX, encode_header
from suzuri.model.checkpoint_io import ShardWriter
from suzuri.model.config import ModelConfig
from suzuri.model.config_file import SIDE_FILE
from suzuri.model.quantization_config import side_file
from suzuri.model.tensor_table import BYTES_PER_VALUE, Entry, Storage, table
from suzuri.model.transfer import Source, copy, region_of, regions

log = get_logger(__name__)

SHARD_BYTES = 5 << 30
PARTIAL_SUFFIX = ".part"
"""Of a shard that is being written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderPlan:
    """What a folder will hold: its config, and the entries of each shard file by file name."""

    config: ModelConfig
    storage: Storage
    shards: dict[str, list[Entry]]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(self.shard_bytes(name) for name in self.shards)

    def shard_bytes(self, name: str) -> int:
        """Bytes of tensor data in one shard."""
        return sum(entry.num_bytes for entry in self.shards[name])

    def header(self, name: str) -> bytes:
        """How the file of one shard begins; its tensors follow in order, to the end."""
        held = self.shards[name]
        return encode_header((entry.name, entry.dtype, entry.shape) for entry in held)


def plan_folder(
    config: ModelConfig, storage: Storage, max_shard_bytes: int = SHARD_BYTES
) -> FolderPlan:
    """Distribute a model's tensors over shards of up to `max_shard_bytes` of data.

    What is made of the same rows of one parameter (gate and up, or codes and scales) stays in one
    file, also where it is larger. The draft depths are apart from the rest, as released.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be at least 1")
    entries = _named(table(config, storage), config, storage)
    main = _groups([entry for entry in entries if entry.part != "mtp"], max_shard_bytes)
    draft = _groups([entry for entry in entries if entry.part == "mtp"], max_shard_bytes)
    shards = {
        f"model-{i:05d}-of-{len(main):05d}.safetensors": group for i, group in enumerate(main, 1)
    }
    if len(draft) == 1:
        shards["mtp.safetensors"] = draft[0]
    else:
        shards |= {
            f"mtp-{i:05d}-of-{len(draft):05d}.safetensors": group
            for i, group in enumerate(draft, 1)
        }
    if config.quantization is not None:
        named = dataclasses.replace(config.quantization, names=storage.names)
        config = dataclasses.replace(config, quantization=named)
    return FolderPlan(config=config, storage=storage, shards=shards)


def _named(entries: tuple[Entry, ...], config: ModelConfig, storage: Storage) -> tuple[Entry, ...]:
    """With the names of a text-only model where transformers has a class of its own for it."""
    if storage.layout == "released" or config.vision is not None or config.audio is not None:
        return entries
    return tuple(
        dataclasses.replace(entry, name=entry.name.replace("model.language_model.", "model.", 1))
        for entry in entries
    )


def _groups(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    together: dict[object, list[Entry]] = {}
    for entry in entries:
        together.setdefault(region_of(entry), []).append(entry)
    groups: list[list[Entry]] = []
    room = 0
    for held in together.values():
        size = sum(entry.num_bytes for entry in held)
        if size > room:
            groups.append([])
            room = max_bytes
        groups[-1] += held
        room -= size
    # Wider values first, so that each tensor lies aligned to its own value size.
    return [sorted(group, key=lambda entry: -BYTES_PER_VALUE[entry.dtype]) for group in groups]


def write_files(
    folder: Path,
    plan: FolderPlan,
    source: Source,
    *,
    may_round: bool,
    progress: Callable[[int], None] | None = None,
    device: torch.device | str | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Write shards, then config, side file and index, into an existing folder.

    Shards that an interrupted call completed are kept: each gets its name only when it is whole and
    on disk, and `check`, which may raise, has been called after its last byte was read. `progress`
    is called with the bytes of tensor data that are done. Raises OSError naming the file, and
    ValueError naming the tensor for a value that its dtype cannot store when not `may_round`.
    """
    done = 0
    kept = complete_shards(folder, plan)
    for name, held in plan.shards.items():
        if name not in kept:
            _write_shard(
                folder / name,
                held,
                source,
                may_round=may_round,
                progress=_shifted(progress, done),
                device=device,
                check=check,
            )
        done += plan.shard_bytes(name)
        if progress is not None:
            progress(done)
        log.debug("%s: %.1f of %.1f GB are written", name, done / 1e9, plan.num_bytes / 1e9)
    for document, contents in documents(plan).items():
        write_json(folder / document, contents)
    sync_folder(folder)


def complete_shards(folder: Path, plan: FolderPlan) -> frozenset[str]:
    """The files of the plan that the folder has whole."""
    return frozenset(name for name in plan.shards if _is_complete(folder / name, plan, name))


def documents(plan: FolderPlan) -> dict[str, object]:
    """By file name: config.json, the quantization side file where there is one, and the index.

    Raises ValueError for a config that the layout's spelling cannot express.
    """
    spelling = plan.storage.layout
    found: dict[str, object] = {"config.json": plan.config.to_dict(spelling)}
    side = side_file(plan.config, spelling)
    if side is not None:
        found[SIDE_FILE] = side
    return found | {f"model{INDEX_SUFFIX}": _index(plan)}


def _index(plan: FolderPlan) -> dict[str, Any]:
    return {
        "metadata": {"total_size": plan.num_bytes},
        "weight_map": {entry.name: name for name, held in plan.shards.items() for entry in held},
    }


def _shifted(progress: Callable[[int], None] | None, done: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda more: progress(done + more)


def _is_complete(path: Path, plan: FolderPlan, name: str) -> bool:
    if not path.is_file():
        return False
    header = plan.header(name)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size == len(header) + plan.shard_bytes(name) and file.read(len(header)) == header


def _write_shard(
    path: Path,
    entries: list[Entry],
    source: Source,
    *,
    may_round: bool,
    progress: Callable[[int], None] | None,
    device: torch.device | str | None,
    check: Callable[[], None] | None,
) -> None:
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    writer = ShardWriter(partial, entries, may_round=may_round)
    try:
        copy(
            regions(entries),
            source,
            writer,
            after=None if progress is None else lambda: progress(writer.num_bytes),
            device=device,
        )
        writer.close()
        if check is not None:
            check()
    finally:
        writer.abandon()
    partial.replace(path)


def settle(partial: Path, target: Path) -> None:
    """Give a finished folder its name; an empty folder in its place goes."""
    partial.rename(target)
    sync_folder(target.parent)


def write_json(path: Path, document: object) -> None:
    """Write a JSON file and have it on disk."""
    with path.open("wb") as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the folder's list of names on disk, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync files alone; a finished folder does not fail for that.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
