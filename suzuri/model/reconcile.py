"""Compares a scanned checkpoint with the model's table, before a tensor is read. No torch here.

Every fault of names, shapes and dtypes is found and listed at once; optional parts (towers, draft
depths) that are absent or not wanted are left off and said so. Read next: weights.py.
"""

# pyright: strict

import collections
import dataclasses

from suzuri.model.checkpoint_files import Checkpoint, CheckpointError, TensorEntry
from suzuri.model.config import ModelConfig
from suzuri.model.tensor_table import OPTIONAL_PARTS, Entry, depth_of, part_of, table

MAX_LISTED = 20
OTHER_LAYOUT = ("model.language_model.", "language_model.", "lm_head.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to read and from where. `parts` has "text" and each optional part that is loaded."""

    reads: tuple[tuple[Entry, TensorEntry], ...]
    parts: frozenset[str]
    skipped: tuple[str, ...]
    absent: tuple[str, ...]
    mtp_depths: int
    notes: tuple[str, ...]


def reconcile(config: ModelConfig, checkpoint: Checkpoint, want: frozenset[str]) -> LoadPlan:
    """Match every tensor of the files with the table.

    `want` names optional parts (vision, audio, mtp); those that the config lacks are not loaded.
    A wanted part that the files lack wholly is off; draft depths 0..k-1 of more load as they are.
    Raises CheckpointError listing every tensor that is missing, surplus, or of another shape or
    dtype, and every draft depth that leaves a hole or is too many.
    """
    unknown = sorted(want - set(OPTIONAL_PARTS))
    if unknown:
        raise ValueError(f"want has {unknown[0]!r}; there are {', '.join(OPTIONAL_PARTS)}")
    _refuse_other_layouts(checkpoint)
    entries = table(config)
    parts, skipped, absent, notes = _choose_parts(entries, checkpoint, want)
    problems: list[str] = []
    depths = 0
    if "mtp" in parts:
        depths = _usable_depths(config, checkpoint, problems)
        if depths < config.mtp_depths:
            notes.append(f"mtp: the files hold {depths} of {config.mtp_depths} draft depths")
    reads: list[tuple[Entry, TensorEntry]] = []
    for entry in entries:
        if entry.part in parts and (entry.depth is None or entry.depth < depths):
            tensor = checkpoint.tensors.get(entry.name)
            fault = _fault(entry, tensor)
            if fault:
                problems.append(fault)
            elif tensor is not None:
                reads.append((entry, tensor))
    known = {entry.name for entry in entries}
    for name, tensor in checkpoint.tensors.items():
        depth = depth_of(name)
        is_listed = depth is not None and depth >= depths
        if name not in known and part_of(name) in parts and not is_listed:
            problems.append(f"{tensor.file}: {name} is surplus: this model has no such tensor")
    if problems:
        raise CheckpointError(_listing(checkpoint, problems))
    return LoadPlan(
        reads=tuple(reads),
        parts=parts,
        skipped=skipped,
        absent=absent,
        mtp_depths=depths,
        notes=(*checkpoint.notes, *notes),
    )


def _refuse_other_layouts(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(OTHER_LAYOUT):
            raise CheckpointError(
                f"{checkpoint.directory / tensor.file}: {name} belongs to the transformers layout, "
                "which is not read yet; give the checkpoint in the released layout"
            )
        if name.endswith((".scale2", ".weight_scale", ".weight_packed")):
            raise CheckpointError(
                f"{checkpoint.directory / tensor.file}: {name} belongs to a quantised checkpoint, "
                "which is not read yet; give the bf16 release"
            )


def _choose_parts(
    entries: tuple[Entry, ...], checkpoint: Checkpoint, want: frozenset[str]
) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...], list[str]]:
    configured = {entry.part for entry in entries}
    stored = collections.Counter(part_of(name) for name in checkpoint.tensors)
    parts, skipped, absent = {"text"}, list[str](), list[str]()
    notes: list[str] = []
    for part in OPTIONAL_PARTS:
        is_usable = part in want and part in configured
        if stored[part] and is_usable:
            parts.add(part)
        elif stored[part]:
            skipped.append(part)
            reason = "the config does not have it" if part in want else "not wanted"
            notes.append(f"{part}: {stored[part]} tensors skipped, {reason}")
        elif is_usable:
            absent.append(part)
            notes.append(f"{part}: off, the config has it but the files hold none of its tensors")
    return frozenset(parts), tuple(skipped), tuple(absent), notes


def _usable_depths(config: ModelConfig, checkpoint: Checkpoint, problems: list[str]) -> int:
    """How many draft depths follow each other from 0; the others are problems."""
    files: dict[int, str] = {}
    for name, tensor in checkpoint.tensors.items():
        depth = depth_of(name)
        if depth is not None:
            files.setdefault(depth, tensor.file)
    usable = 0
    while usable in files and usable < config.mtp_depths:
        usable += 1
    for depth, file in sorted(files.items()):
        if depth >= config.mtp_depths:
            problems.append(
                f"{file}: model.mtp.layers.{depth} is surplus: the config has "
                f"{config.mtp_depths} draft depths"
            )
        elif depth >= usable:
            problems.append(
                f"{file}: model.mtp.layers.{depth} cannot be used without depth {usable}, "
                "whose hidden states it continues"
            )
    if not files:
        problems.append("model.mtp.layers.0 is missing, though the files hold other mtp tensors")
    return usable


def _fault(entry: Entry, tensor: TensorEntry | None) -> str | None:
    if tensor is None:
        return f"{entry.name} {list(entry.shape)} is missing from every file"
    where = f"{tensor.file}: {entry.name}"
    if tensor.shape != entry.shape:
        swapped = (*entry.shape[:-2], *entry.shape[-2:][::-1])
        hint = " (it is transposed)" if tensor.shape == swapped else ""
        return f"{where} has shape {list(tensor.shape)}{hint}; must be {list(entry.shape)}"
    if tensor.dtype != entry.dtype:
        return f"{where} has dtype {tensor.dtype}; must be {entry.dtype}"
    return None


def _listing(checkpoint: Checkpoint, problems: list[str]) -> str:
    count = len(problems)
    lines = [f"{checkpoint.directory} does not fit the config: {count} problem(s)"]
    lines += [f"  {problem}" for problem in problems[:MAX_LISTED]]
    if count > MAX_LISTED:
        lines.append(f"  and {count - MAX_LISTED} more")
    return "\n".join(lines)
