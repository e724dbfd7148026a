"""Loads a checkpoint into a model and writes a model back: transfer.copy with the two ends.

Loading reads in small pieces; exporting writes into a new folder that appears whole or not at all.
"""

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import Checkpoint, scan
from suzuri.model.checkpoint_io import CheckpointReader
from suzuri.model.checkpoint_writer import (
    SHARD_BYTES,
    documents,
    plan_folder,
    settle,
    write_files,
)
from suzuri.model.config import WEIGHT_DTYPES, ModelConfig, Quantization
from suzuri.model.inkling import Inkling
from suzuri.model.model_io import ModelWeights
from suzuri.model.reconcile import LoadPlan, held_config, reconcile
from suzuri.model.tensor_names import Layout
from suzuri.model.tensor_table import Storage, released_nvfp4_layers, storage_of, table
from suzuri.model.transfer import copy, regions

log = get_logger(__name__)

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
    directory: str | Path | Checkpoint,
    *,
    want: frozenset[str],
    progress: Progress | None = None,
) -> LoadReport:
    """Fill every parameter of `model` from a folder in any layout (or from its scan).

    `want` names the optional parts to load: "vision", "audio", "mtp". Afterwards the model holds
    exactly what was loaded: a tower or draft that was not is set to None, and draft depths that
    the files lack are cut off. Values are converted from the stored dtype to the parameter's, on
    whatever device that is. NVFP4 experts are kept as they are by a model that holds such, and
    dequantised for any other. `progress(done, total)` is called in bytes read.

    Raises CheckpointError, before the model is changed, listing every file and tensor at fault (a
    block scale that is NaN is found only when its turn comes), and ValueError for a wanted part
    that the model was built without.
    """
    checkpoint = directory if isinstance(directory, Checkpoint) else scan(directory)
    plan = reconcile(model.config, checkpoint, want)
    _check_built(model, plan)
    total = sum(tensor.nbytes for _, tensor in plan.reads)
    entries = [entry for entry, _ in plan.reads]
    with CheckpointReader(checkpoint, plan.reads) as reader:
        reader.check_small()
        _drop_unloaded(model, plan)
        weights = ModelWeights(model)
        weights.check(entries)
        after = None if progress is None else lambda: progress(reader.num_bytes, total)
        log.debug("reading %d tensors from %s", len(entries), checkpoint.directory)
        copy(regions(entries), reader, weights, after=after)
        weights.check_written()
        assert reader.num_bytes == total, f"{reader.num_bytes} of {total} bytes read"
    return LoadReport(
        parts=plan.parts,
        skipped=plan.skipped,
        absent=plan.absent,
        mtp_depths=plan.mtp_depths,
        num_tensors=len(plan.reads),
        num_bytes=total,
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


def export_weights(
    model: Inkling,
    directory: str | Path,
    *,
    layout: Layout = "released",
    experts: Literal["bf16", "nvfp4"] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
) -> Checkpoint:
    """Write config.json and the weights to a new folder; return its scan.

    Parts that the model lacks are left out of the config too. Shards hold up to `max_shard_bytes`
    of tensor data, or one larger tensor. `dtype` "bfloat16" (round to nearest even) or "float32"
    chooses how weights are stored; None stores them as the config says and raises ValueError,
    naming the first tensor, when that would change a value. The router's bias and scale are always
    fp32. `experts` stores the routed experts that the releases quantise as NVFP4, or all in the
    weights' dtype; None keeps what the model holds. The folder appears under its name only when
    complete. ValueError if it holds anything.
    """
    target = new_folder(directory)
    weights = ModelWeights(model)
    config = _held_config(model, dtype)
    if experts == "nvfp4" and config.quantization is None:
        config = quantised(config)
    elif experts == "bf16" or (experts is None and not weights.nvfp4_layers):
        config = dataclasses.replace(config, quantization=None)
    storage = stored_as(config, layout, activations=weights.has_input_amax)
    weights.check(table(config, Storage()))
    plan = plan_folder(config, storage, max_shard_bytes)
    documents(plan)  # refuses what they cannot say
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        write_files(partial, plan, weights, may_round=dtype is not None)
        settle(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # there only if something above failed
    return scan(target)


def new_folder(directory: str | Path) -> Path:
    """The folder to write, links followed. ValueError when it is there and not empty."""
    target = Path(os.path.realpath(directory))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give a new one")
    return target


def quantised(config: ModelConfig) -> ModelConfig:
    """The config with NVFP4 experts as the releases have them.

    ValueError when there are none to quantise or their widths are no multiples of 16.
    """
    layers = released_nvfp4_layers(config)
    if not layers:
        raise ValueError(
            "this model has no routed experts from layer 3 on, which are what NVFP4 checkpoints "
            "quantise; keep bf16"
        )
    return dataclasses.replace(config, quantization=Quantization(names="modelopt", layers=layers))


def stored_as(
    config: ModelConfig, layout: Layout, *, activations: bool, names: str | None = None
) -> Storage:
    """The storage to write a config's model in; `names` of quantised tensors other than its own."""
    storage = storage_of(config, layout)
    return dataclasses.replace(storage, names=names or storage.names, activations=activations)


def _held_config(model: Inkling, dtype: str | None) -> ModelConfig:
    """The model's config without the parts it does not hold, storing `dtype`."""
    config = model.config
    if dtype is not None:
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(WEIGHT_DTYPES)}")
        config = dataclasses.replace(
            config, text=dataclasses.replace(config.text, torch_dtype=dtype)
        )
    parts = frozenset(
        part for part, name in PART_MODULES.items() if getattr(model, name) is not None
    )
    depths = 0 if model.draft is None else len(model.draft.depths)
    return held_config(config, parts, depths)
