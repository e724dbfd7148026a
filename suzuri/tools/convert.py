"""`suzuri convert`: a checkpoint in another layout, streamed and resumable. Read `run_convert`.

convert_folder.py has the folder that is filled, convert_progress.py what is shown meanwhile.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from rich.console import Console

from suzuri import __version__
from suzuri.engine.devices import device_named
from suzuri.model.checkpoint_files import Checkpoint, CheckpointError, scan
from suzuri.model.checkpoint_io import CheckpointReader
from suzuri.model.checkpoint_writer import (
    FolderPlan,
    complete_shards,
    documents,
    plan_folder,
    write_files,
)
from suzuri.model.config import ModelConfig
from suzuri.model.locate import Located, locate
from suzuri.model.random_weights import RandomWeights
from suzuri.model.reconcile import held_config, reconcile
from suzuri.model.tensor_names import OPTIONAL_PARTS, Layout
from suzuri.model.tensor_table import FIRST_NVFP4_LAYER, parameter_shapes, table
from suzuri.model.transfer import Source
from suzuri.model.weights import quantised, stored_as
from suzuri.tools.convert_config import ConvertConfig
from suzuri.tools.convert_folder import (
    check_room,
    claimed,
    copy_file,
    destination,
    finish,
    other_files,
)
from suzuri.tools.convert_progress import shown
from suzuri.tools.convert_values import FiniteSource

GO_ON = " The same command (without --restart) goes on from there."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What is converted: its config as held, where the values come from, what it is known by.

    `check` raises when the files are not those any more that were looked at, `check_divisors` when
    compressed-tensors cannot hold the global scales (that takes seconds).
    """

    config: ModelConfig
    source: Source
    activations: bool
    layout: Layout
    identity: str
    notes: tuple[str, ...]
    check: Callable[[], None]
    check_divisors: Callable[[], None]


def run_convert(config: ConvertConfig) -> int:
    """Converts and prints what was written. Returns 0.

    Raises ValueError or OSError where source, destination or disk do not allow it.
    """
    console = Console()
    device = device_named(config.device, f"--device {config.device}")
    located = locate(config.source, weights=not config.random_weights)
    target = destination(config.destination, located.folder)
    with _origin(config, located) as origin:
        plan, notes = _plan(config, origin)
        documents(plan)  # refuses what they cannot say, before anything is written
        # What lies beside shipped weights tells of them, not of drawn ones.
        is_shape = config.random_weights and located.kind == "preset"
        along, left = other_files(None if is_shape else located.folder)
        notes += [f"not copied: {', '.join(left)}"] * bool(left)
        for note in (*origin.notes, *notes):
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        check_room(target, plan, sum(file.stat().st_size for file in along))
        record = _record(origin, plan)
        with (
            claimed(target, record, restart=config.restart) as partial,
            _explained(partial, console),
        ):
            _write(console, partial, plan, origin, device)
            for file in along:
                copy_file(file, partial)
            reconcile(ModelConfig.from_file(partial), scan(partial), frozenset(OPTIONAL_PARTS))
            finish(partial, target, plan)
    print(
        f"wrote {target}: {plan.storage.layout} layout, {_experts(plan)}, "
        f"{len(plan.shards)} shards, {plan.num_bytes / 1e9:.3f} GB of tensors"
        + (f", and {len(along)} other files" if along else "")
    )
    return 0


@contextlib.contextmanager
def _explained(partial: Path, console: Console) -> Generator[None]:
    """However it stops: where the unfinished folder is, and how to go on where that can be."""
    try:
        yield
    except (KeyboardInterrupt, ValueError, OSError) as error:
        # A ValueError says itself what must change first, in the source mostly.
        go_on = "" if isinstance(error, ValueError) else GO_ON
        console.print(
            f"stopped; {partial} keeps the shards that are complete.{go_on} Remove it when it is "
            "not wanted",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise


@contextlib.contextmanager
def _origin(config: ConvertConfig, located: Located) -> Generator[Origin]:
    unknown = located.config.unknown_keys
    notes = [f"config.json: unknown keys are not carried over: {', '.join(unknown)}"]
    notes *= bool(unknown)
    if config.random_weights:
        shape = located.config
        depths = shape.mtp_depths if config.mtp else 0
        shape = held_config(shape, config.want, depths)
        yield Origin(
            config=shape,
            source=RandomWeights(parameter_shapes(table(shape)), seed=config.seed),
            activations=False,
            layout="released",
            identity=f"random weights of seed {config.seed}",
            notes=tuple(notes),
            check=lambda: None,
            check_divisors=lambda: None,
        )
        return
    checkpoint = located.checkpoint()
    states = _states(checkpoint)
    held = reconcile(located.config, checkpoint, config.want)
    with CheckpointReader(checkpoint, held.reads) as reader:
        reader.check_small()
        yield Origin(
            config=held.config,
            source=FiniteSource(reader, checkpoint.directory, held.reads),
            activations=any(entry.field.startswith("input_") for entry, _ in held.reads),
            layout=checkpoint.layout,
            identity=_identity(checkpoint, states),
            notes=(*held.notes, *notes),
            check=lambda: _check_unchanged(checkpoint, states),
            check_divisors=reader.check_divisors,
        )


def _states(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Size and time of each file."""
    stats = {name: (checkpoint.directory / name).stat() for name in checkpoint.files}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _check_unchanged(checkpoint: Checkpoint, states: dict[str, tuple[int, int]]) -> None:
    for name, state in states.items():
        file = checkpoint.directory / name
        try:
            stat = file.stat()
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be found any more: {error.strerror}; put it back unchanged and run "
                "the same command again"
            ) from error
        if (stat.st_size, stat.st_mtime_ns) != state:
            raise CheckpointError(
                f"{file} has changed while it was read; convert again with --restart when nobody "
                "writes to it"
            )


def _identity(checkpoint: Checkpoint, states: dict[str, tuple[int, int]]) -> str:
    """Changes when a file of the checkpoint does."""
    digest = hashlib.sha256()
    for name, (size, time) in states.items():
        digest.update(f"{name} {size} {time}\n".encode())
    for name, tensor in checkpoint.tensors.items():
        digest.update(f"{name} {tensor}\n".encode())
    return digest.hexdigest()


def _plan(config: ConvertConfig, origin: Origin) -> tuple[FolderPlan, list[str]]:
    """What to write, and notes about it."""
    model = origin.config
    notes: list[str] = []
    if config.experts == "bf16":
        model = dataclasses.replace(model, quantization=None)
    elif config.experts == "nvfp4" and model.quantization is None:
        model = quantised(model)
        notes += _left_alone(model)
    layout = config.layout or origin.layout
    storage = stored_as(model, layout, activations=origin.activations, names=config.names)
    is_quantised = bool(storage.nvfp4_layers)
    if config.names is not None and not is_quantised:
        raise ValueError(f"--names {config.names}: the result has no NVFP4 experts to name")
    if is_quantised and storage.names == "compressed-tensors":
        origin.check_divisors()
    if origin.activations and not is_quantised:
        notes.append("the experts' activation scales (input_amax) are dropped with NVFP4")
    return plan_folder(model, storage, max(1, int(config.max_shard_gb * 1e9))), notes


def _left_alone(model: ModelConfig) -> list[str]:
    """What quantising does not touch."""
    assert model.quantization is not None
    text = model.text
    others = [
        str(layer)
        for layer in range(text.num_hidden_layers)
        if not text.is_dense(layer) and layer not in model.quantization.layers
    ]
    kept = f"those of layer {', '.join(others)} and all other weights" if others else "the others"
    return [
        "NVFP4 goes where the released checkpoints have it, to the routed experts from layer "
        f"{FIRST_NVFP4_LAYER} on; {kept} stay {text.torch_dtype}"
    ]


def _record(origin: Origin, plan: FolderPlan) -> dict[str, object]:
    """What must be equal for a conversion to go on."""
    return {
        "suzuri version": __version__,
        "source": origin.identity,
        "config": plan.config.to_dict(),
        "storage": dataclasses.asdict(plan.storage)
        | {"nvfp4_layers": [*plan.storage.nvfp4_layers]},
        "shards": {name: [entry.name for entry in held] for name, held in plan.shards.items()},
    }


def _write(
    console: Console, partial: Path, plan: FolderPlan, origin: Origin, device: torch.device
) -> None:
    names = complete_shards(partial, plan)
    kept = sum(plan.shard_bytes(name) for name in names)
    if names:
        print(f"going on: {len(names)} of {len(plan.shards)} shards are there", flush=True)
    with shown(console, plan.num_bytes, kept) as progress:
        write_files(
            partial,
            plan,
            origin.source,
            may_round=False,
            progress=progress,
            device=device,
            check=origin.check,
        )


def _experts(plan: FolderPlan) -> str:
    layers = plan.storage.nvfp4_layers
    if not layers:
        return f"{plan.config.text.torch_dtype} weights"
    return f"NVFP4 experts in {len(layers)} layers ({plan.storage.names} names)"
