"""What a trace reads: records, and a checkpoint with progress, after asking whether it fits."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.tensor_table import table
from suzuri.model.weights import load_weights

MEMINFO = Path("/proc/meminfo")
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def read_records(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of expected numbers. Raises ValueError naming the file."""
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


def load_model(folder: Path, dtype: str, console: Console) -> Inkling:
    """Loads a checkpoint in the released layout with progress; prints what was left out."""
    config = ModelConfig.from_file(folder)
    if config.unknown_keys:
        keys = ", ".join(config.unknown_keys)
        console.print(f"config.json: ignored unknown keys {keys}", markup=False)
    refuse_too_big(config, dtype, folder)
    model = Inkling(config, dtype=getattr(torch, dtype))
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        report = load_weights(
            model,
            folder,
            want=PARTS,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(
        f"loaded {report.num_tensors} tensors, {report.num_bytes / 1e6:.1f} MB, from {folder} "
        f"as {dtype}: {', '.join(sorted(report.parts))}; {report.mtp_depths} draft depths",
        markup=False,
    )
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    return model


def refuse_too_big(shape: ModelConfig, dtype: str, where: object) -> None:
    """Raises ValueError with both figures when the weights cannot fit into free memory."""
    gigabytes = sum(entry.num_values for entry in table(shape)) * BYTES[dtype] * 13 // 10**10
    free = _available_bytes()
    if free is not None and gigabytes > free // 10**9:
        needed = f"{gigabytes:,}" if gigabytes < 10**9 else "more than 1,000,000,000"
        raise ValueError(
            f"{where}: this shape needs about {needed} GB as {dtype} (weights and 30 % beside "
            f"them), {free / 1e9:.1f} GB are free; give a smaller config or another --dtype"
        )


def _available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell (macOS)."""
    if not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024
