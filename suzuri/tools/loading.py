"""What a trace reads: records, and a checkpoint with progress, after asking whether it fits."""

import dataclasses
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from suzuri.engine.load import read_weights
from suzuri.engine.memory import available_memory
from suzuri.model.checkpoint_files import Checkpoint
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.reconcile import reconcile
from suzuri.model.tensor_table import table
from suzuri.model.weights import LoadReport

GB = 10**9
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def read_records(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of expected numbers. Raises ValueError naming the file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a plain file; copy the records again")
    if not path.exists():
        raise ValueError(
            f"{path} is missing: a golden folder holds it beside original/, a checkpoint folder "
            f"holds config.json, and {path.parent} holds neither"
        )
    try:
        with path.open("rb"):  # says in words why a file cannot be opened
            return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from None


def load_model(
    checkpoint: Checkpoint, dtype: str, console: Console, want: frozenset[str] = PARTS
) -> tuple[Inkling, LoadReport]:
    """Loads a checkpoint of any layout with progress; prints what was left out.

    `want` names the optional parts; without "vision" and "audio" the model is text-only. NVFP4
    experts stay quantised in memory, wherever the files rather than the config tell of them.
    """
    folder = checkpoint.directory
    config = ModelConfig.from_file(folder)
    if config.unknown_keys:
        keys = ", ".join(config.unknown_keys)
        console.print(f"config.json: ignored unknown keys {keys}", markup=False)
    plan = reconcile(config, checkpoint, want)
    config = dataclasses.replace(config, quantization=plan.config.quantization)
    config = with_towers(config, want)
    refuse_too_big(config, dtype, folder)
    model = Inkling(config, dtype=getattr(torch, dtype))
    report = read_weights(model, checkpoint, want, console)
    console.print(
        f"loaded {report.num_tensors} tensors, {report.num_bytes / 1e6:.1f} MB, from {folder} "
        f"as {dtype}: {', '.join(sorted(report.parts))}; {report.mtp_depths} draft depths",
        markup=False,
    )
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    return model, report


def with_towers(config: ModelConfig, want: frozenset[str]) -> ModelConfig:
    """The config with those of its towers that are wanted."""
    return dataclasses.replace(
        config,
        vision=config.vision if "vision" in want else None,
        audio=config.audio if "audio" in want else None,
    )


def refuse_too_big(shape: ModelConfig, dtype: str, where: object) -> None:
    """Raises ValueError with both figures when the weights cannot fit into free memory."""
    gigabytes = _needed_bytes(shape, dtype) * 13 // (10 * GB)
    free = available_memory()
    if free is not None and gigabytes > free // GB:
        needed = f"{gigabytes:,}" if gigabytes < 10**9 else "more than 1,000,000,000"
        raise ValueError(
            f"{where}: this shape needs about {needed} GB as {dtype} (weights and 30 % beside "
            f"them), {free / GB:.1f} GB are free; give a smaller config or another --dtype"
        )


def _needed_bytes(shape: ModelConfig, dtype: str) -> int:
    """Of the weights as held, and of the experts that are dequantised at once, a layer's."""
    held, largest = 0, 0
    for entry in table(shape):
        if entry.field == "values":
            held += entry.num_values * BYTES[dtype]
        else:
            held += entry.num_bytes
            if entry.field == "codes":
                largest = max(largest, 2 * entry.num_values * BYTES[dtype])
    return held + largest
