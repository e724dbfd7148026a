"""Compares a scanned checkpoint with the model's table, before a tensor is read. No torch here.

Every fault of names, shapes and dtypes is found and listed at once; optional parts (towers, draft
depths) that are absent or not wanted are left off and said so. Read next: weights.py.
"""

# pyright: strict

import collections
import dataclasses

from suzuri.model.checkpoint_files import Checkpoint, CheckpointError, TensorEntry, listing
from suzuri.model.config import ModelConfig, MtpConfig, Quantization
from suzuri.model.tensor_names import OPTIONAL_PARTS, PART_PREFIXES, depth_of, part_of
from suzuri.model.tensor_table import (
    FIELD_SUFFIXES,
    OPTIONAL_FIELDS,
    STORED_AS,
    Entry,
    Storage,
    layer_of,
    table,
)

ONE_VALUE = ((), (1,))
"""Two ways to store a single number, which writers mix."""
TOWERS = ("vision", "audio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to read and from where. `parts` has "text" and each optional part that is loaded.

    `config` describes exactly what is loaded, as it is stored.
    """

    config: ModelConfig
    reads: tuple[tuple[Entry, TensorEntry], ...]
    storage: Storage
    parts: frozenset[str]
    skipped: tuple[str, ...]
    absent: tuple[str, ...]
    mtp_depths: int
    notes: tuple[str, ...]


def reconcile(config: ModelConfig, checkpoint: Checkpoint, want: frozenset[str]) -> LoadPlan:
    """Match every tensor of the files with the table.

    `want` names optional parts (vision, audio, mtp). A wanted part that the files lack wholly is
    off; draft depths 0..k-1 of more load as they are. Draft depths that the config lacks are not
    loaded; a tower that it lacks but the files hold is a fault where it is wanted.
    The files tell the layout and which experts are quantised; a config that says something else
    about that is a fault, one that says nothing is not. Raises CheckpointError listing every tensor
    that is missing, surplus, or of another shape or dtype, and every draft depth that leaves a hole
    or is too many.
    """
    unknown = sorted(want - set(OPTIONAL_PARTS))
    if unknown:
        raise ValueError(f"want has {unknown[0]!r}; there are {', '.join(OPTIONAL_PARTS)}")
    problems: list[str] = []
    storage, notes = _storage(config, checkpoint, problems)
    stored = _stored_config(config, checkpoint, notes)
    entries = _present(table(stored, storage), checkpoint, notes)
    parts, skipped, absent = _choose_parts(entries, checkpoint, want, notes, problems)
    depths = 0
    if "mtp" in parts:
        depths = _usable_depths(config, checkpoint, problems)
        if depths < config.mtp_depths:
            notes.append(f"mtp: the files hold {depths} of {config.mtp_depths} draft depths")
    reads: list[tuple[Entry, TensorEntry]] = []
    narrow: list[str] = []
    for entry in entries:
        if entry.part in parts and (entry.depth is None or entry.depth < depths):
            tensor = checkpoint.tensors.get(entry.name)
            is_narrow = tensor is not None and _is_narrow(entry, tensor, checkpoint)
            stored_as = dataclasses.replace(entry, dtype="BF16") if is_narrow else entry
            fault = _fault(stored_as, tensor)
            if fault:
                problems.append(fault)
            elif tensor is not None:
                reads.append((stored_as, tensor))
                narrow += [tensor.stored_name] * is_narrow
    if narrow:
        notes.append(
            f"{len(narrow)} tensors of routers are bf16 instead of fp32, first {narrow[0]}; every "
            "value is taken as it is"
        )
    known = {entry.name for entry in entries}
    for name, tensor in checkpoint.tensors.items():
        depth = depth_of(name)
        is_listed = depth is not None and depth >= depths
        if name not in known and part_of(name) in parts and not is_listed:
            problems.append(f"{tensor.file}: {name} is surplus: this model has no such tensor")
    if problems:
        raise CheckpointError(listing(f"{checkpoint.directory} does not fit the config", problems))
    return LoadPlan(
        config=held_config(_with_quantization(stored, storage), parts, depths),
        reads=tuple(reads),
        storage=storage,
        parts=parts,
        skipped=skipped,
        absent=absent,
        mtp_depths=depths,
        notes=(*checkpoint.notes, *notes),
    )


def _storage(
    config: ModelConfig, checkpoint: Checkpoint, problems: list[str]
) -> tuple[Storage, list[str]]:
    """How the files keep the model: their layout, and the layers with NVFP4 experts."""
    said = config.quantization
    plain = table(config, Storage(layout=checkpoint.layout))
    found: dict[str, set[int]] = {names: set() for names in FIELD_SUFFIXES}
    examples: dict[int, str] = {}
    for entry in plain:
        layer = layer_of(entry.name)
        if layer is None:
            continue
        for names, suffixes in FIELD_SUFFIXES.items():
            tensors = [entry.name + suffix for suffix in suffixes if suffix]
            tensors = [name for name in tensors if name in checkpoint.tensors]
            if tensors:
                found[names].add(layer)
                examples.setdefault(layer, tensors[0])
    names = max(found, key=lambda one: len(found[one]))
    if not any(found.values()):
        names = said.names if said is not None else names
    layers = found["modelopt"] | found["compressed-tensors"]
    notes: list[str] = []
    if layers and said is None:
        notes.append(
            f"experts of {len(layers)} layers are NVFP4, which neither config.json nor "
            "hf_quant_config.json says"
        )
    elif said is not None:
        for layer in sorted(layers - set(said.layers)):
            tensor = checkpoint.tensors[examples[layer]]
            problems.append(
                f"{tensor.file}: {tensor.stored_name} is of an NVFP4 tensor, but the quantization "
                f"block excludes the experts of layer {layer}"
            )
        layers |= set(said.layers)
    return (
        Storage(layout=checkpoint.layout, nvfp4_layers=tuple(sorted(layers)), names=names),
        notes,
    )


def _stored_config(config: ModelConfig, checkpoint: Checkpoint, notes: list[str]) -> ModelConfig:
    """The config with the weight dtype of the files, where all of them agree on another.

    Writers of the transformers layout put the dtype in which the model ran into the config.
    """
    if checkpoint.layout != "transformers":
        return config
    said = config.text.torch_dtype
    text = dataclasses.replace(config.text, torch_dtype="bfloat16")
    entries = table(dataclasses.replace(config, text=text), Storage(layout="transformers"))
    weights = [entry.name for entry in entries if entry.dtype == "BF16"]  # not the router's bias
    stored = {checkpoint.tensors[name].dtype for name in weights if name in checkpoint.tensors}
    stored -= {"U8"}
    held = [name for name, dtype in STORED_AS.items() if stored == {dtype}]
    if not held or held[0] == said:
        return config
    notes.append(f"the config says {said}, the files hold {held[0]} throughout")
    text = dataclasses.replace(config.text, torch_dtype=held[0])
    return dataclasses.replace(config, text=text)


def _with_quantization(config: ModelConfig, storage: Storage) -> ModelConfig:
    found = None
    if storage.nvfp4_layers:
        found = Quantization(names=storage.names, layers=storage.nvfp4_layers)
    return dataclasses.replace(config, quantization=found)


def held_config(config: ModelConfig, parts: frozenset[str], depths: int) -> ModelConfig:
    """The config with these optional parts only, and the first `depths` draft depths."""
    local = tuple(d for d in config.mtp.local_layer_ids if d < depths)
    mtp = dataclasses.replace(config.mtp, num_nextn_predict_layers=depths, local_layer_ids=local)
    return dataclasses.replace(
        config,
        vision=config.vision if "vision" in parts else None,
        audio=config.audio if "audio" in parts else None,
        mtp=mtp if depths else MtpConfig(),
    )


def _present(
    entries: tuple[Entry, ...], checkpoint: Checkpoint, notes: list[str]
) -> tuple[Entry, ...]:
    """Without the kinds of optional tensors that no quantised tensor has; some is a fault later."""
    kinds = {e.field for e in entries} & set(OPTIONAL_FIELDS)
    held = {e.field for e in entries if e.field in kinds and e.name in checkpoint.tensors}
    if kinds - held - {"original_shape"}:
        notes.append("NVFP4 experts without activation scales: weight-only")
    return tuple(e for e in entries if e.field not in kinds - held)


def _choose_parts(
    entries: tuple[Entry, ...],
    checkpoint: Checkpoint,
    want: frozenset[str],
    notes: list[str],
    problems: list[str],
) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    configured = {entry.part for entry in entries}
    stored = collections.Counter(part_of(name) for name in checkpoint.tensors)
    parts, skipped, absent = {"text"}, list[str](), list[str]()
    for part in OPTIONAL_PARTS:
        is_usable = part in want and part in configured
        if stored[part] and is_usable:
            parts.add(part)
        elif stored[part] and part in want and part in TOWERS:
            problems.append(_surplus_tower(part, stored[part], checkpoint))
        elif stored[part]:
            skipped.append(part)
            reason = "the config does not have it" if part in want else "not wanted"
            notes.append(f"{part}: {stored[part]} tensors skipped, {reason}")
        elif is_usable:
            absent.append(part)
            notes.append(f"{part}: off, the config has it but the files hold none of its tensors")
    return frozenset(parts), tuple(skipped), tuple(absent)


def _surplus_tower(part: str, count: int, checkpoint: Checkpoint) -> str:
    name, tensor = next((n, t) for n, t in checkpoint.tensors.items() if part_of(n) == part)
    prefix = next(prefix for prefix in PART_PREFIXES[part] if name.startswith(prefix))
    return (
        f"{tensor.file}: {prefix}* is surplus: {count} tensors of a tower that config.json does "
        f"not have ({part}_config). Put the block back, or leave the towers out knowingly: "
        "`suzuri generate`, `suzuri trace` and `suzuri convert` do with --text-only, suzuri.LLM "
        "with text_only=True"
    )


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


def _is_narrow(entry: Entry, tensor: TensorEntry, checkpoint: Checkpoint) -> bool:
    """A router's fp32 bias or scale in bf16: what transformers saves of a model run in bf16."""
    return (
        checkpoint.layout == "transformers"
        and (entry.dtype, tensor.dtype, entry.field) == ("F32", "BF16", "values")
        and ".mlp.gate." in entry.name
        and not entry.name.endswith(".weight")
    )


def _fault(entry: Entry, tensor: TensorEntry | None) -> str | None:
    if tensor is None:
        return f"{entry.name} {list(entry.shape)} is missing from every file"
    where = f"{tensor.file}: {tensor.stored_name}"
    if tensor.shape not in _shapes(entry):
        swapped = (*entry.shape[:-2], *entry.shape[-2:][::-1])
        hint = " (it is transposed)" if tensor.shape == swapped else ""
        return f"{where} has shape {list(tensor.shape)}{hint}; must be {list(entry.shape)}"
    if tensor.dtype != entry.dtype:
        return f"{where} has dtype {tensor.dtype}; must be {entry.dtype}"
    return None


def _shapes(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """The shapes in which the tensor may be stored."""
    if entry.field == "global_divisors":  # one per expert, or one for all
        return (entry.shape, (*entry.shape, 1), *ONE_VALUE)
    if entry.field == "global_scales":
        one = ONE_VALUE if entry.shape == (1,) else ()
        return (entry.shape, (*entry.shape, 1), *one)
    if entry.shape == (1,):
        return ONE_VALUE
    return (entry.shape,)
