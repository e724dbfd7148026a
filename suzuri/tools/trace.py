"""`suzuri trace`: our numbers against a golden folder's, item by item, as a table.

The verdict is the last line, and names the first item that fails. golden.py computes our side,
media_trace.py the preprocessing's, self_trace.py what has no expected numbers.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
from suzuri.tools.golden import compute, record_problem
from suzuri.tools.trace_config import TraceConfig

LAYOUT_FOLDERS = {"released": "original"}
NOT_COMPARED = ("mtp.raw.",)
"""`raw` feeds the drafts un-normed embeddings, as one other package does; the model does not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed |ours - expected|: atol + rtol * |expected|; both 0 means equal."""

    atol: float = 0.0
    rtol: float = 0.0

    def __str__(self) -> str:
        if not self.atol and not self.rtol:
            return "equal"
        return f"{self.atol:g}" + (f" + {self.rtol:g} |x|" if self.rtol else "")


EXACT = Tolerance()
LOGITS = Tolerance(atol=1e-4)
LAYERS = Tolerance(atol=1e-3, rtol=1e-5)
TOWERS = Tolerance(atol=1e-5)
DRAFTS = Tolerance(atol=1e-4)


def tolerance(name: str) -> Tolerance:
    """The tolerance of a golden item by its name (tests/golden/README.md)."""
    if name.endswith(("ids", "drafts")):
        return EXACT
    if name.startswith(("vision.", "audio.")):
        return TOWERS
    if name.startswith("mtp."):
        return DRAFTS
    if name.endswith("logits") and ".layer." not in name:
        return LOGITS
    return LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One compared item. `problem` is empty when it is within tolerance."""

    name: str
    difference: float
    limit: str
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def compare(name: str, ours: Tensor | None, expected: Tensor, limit: Tolerance) -> Row:
    """Compares one item. Shapes may differ by leading ones only; NaN is never within tolerance."""
    if ours is None:
        return Row(
            name=name,
            difference=float("nan"),
            limit=str(limit),
            problem="expected, but nothing here computes it: the part or its input is absent",
        )
    if ours.numel() != expected.numel() or _trimmed(ours) != _trimmed(expected):
        return Row(
            name=name,
            difference=float("nan"),
            limit=str(limit),
            problem=f"shape {list(ours.shape)}, expected {list(expected.shape)}",
        )
    wide = expected.to(torch.float64).cpu()
    gap = (ours.reshape(expected.shape).to(torch.float64).cpu() - wide).abs()
    bad = ~(gap <= limit.atol + limit.rtol * wide.abs())
    problem = ""
    if bool(bad.any()):
        place = [int(i) for i in bad.nonzero()[0]]
        where = tuple(place)
        problem = (
            f"differs by {gap[where]:.3g} at {place}: ours "
            f"{ours.reshape(expected.shape)[where].item():.6g}, expected {wide[where].item():.6g}; "
            f"allowed {limit}; {int(bad.sum())} of {bad.numel()} values are out"
        )
    largest = float(gap.max()) if gap.numel() else 0.0
    return Row(name=name, difference=largest, limit=str(limit), problem=problem)


def _trimmed(x: Tensor) -> list[int]:
    """The shape without leading ones (golden items carry a batch dim of 1)."""
    shape = list(x.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return shape


def run_trace(config: TraceConfig) -> int:
    """Runs one trace and prints its table. Returns the exit code (0, or 1 when an item fails).

    Raises ValueError or OSError where the input cannot be used, naming the file and the fix.
    """
    console = Console()
    if config.random_weights:
        from suzuri.tools.self_trace import trace_shape

        return show(console, trace_shape(config, console), "the shape", "itself")
    assert config.directory is not None
    folder = config.directory
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if (folder / "media.safetensors").exists():
        from suzuri.tools.media_trace import trace_media

        refuse_unused_flags(config)
        return show(console, trace_media(folder), str(folder))
    if (folder / "config.json").exists():
        from suzuri.tools.self_trace import self_checks

        model = load_model(folder, config.dtype, console)
        return show(console, self_checks(model, config, console), str(folder), "itself")
    refuse_unused_flags(config)
    expected = read_records(folder / "expected.safetensors")
    checkpoint = folder / LAYOUT_FOLDERS[config.layout]
    model = load_model(checkpoint, config.dtype, console)
    refuse_other_model(model, expected, folder / "expected.safetensors", checkpoint)
    with console.status("") as status:
        got = compute(model, expected, lambda part: status.update(f"running {part}"))
    return show(console, golden_rows(got, expected, console), str(folder))


def refuse_unused_flags(config: TraceConfig) -> None:
    """A flag that would have no effect must not look as if it had one."""
    if config.num_tokens is not None or config.seed is not None:
        raise ValueError("--num-tokens and --seed have no effect on a folder with expected numbers")


def golden_rows(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], console: Console
) -> list[Row]:
    """One row per expected item, in the order in which the model computes them."""
    order = {name: i for i, name in enumerate(got)}
    inputs = ("input_ids", "pixel_values", "audio.bins", "hidden_in")
    names = [n for n in expected if not n.endswith(inputs) and not n.startswith(NOT_COMPARED)]
    skipped = [n for n in expected if n.startswith(NOT_COMPARED)]
    if skipped:
        console.print(
            f"not compared: {len(skipped)} items {NOT_COMPARED[0]}* (another package's variant)"
        )
    names.sort(key=lambda name: (order.get(name, len(order)), name))
    return [compare(name, got.get(name), expected[name], tolerance(name)) for name in names]


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


def refuse_other_model(
    model: Inkling, expected: dict[str, Tensor], records: Path, checkpoint: Path
) -> None:
    """Raises ValueError naming file and item when the records cannot be this checkpoint's."""
    problem = record_problem(model, expected)
    if problem:
        raise ValueError(f"{records}: {problem}; are these the records of {checkpoint}?")


def load_model(folder: Path, dtype: str, console: Console) -> Inkling:
    """Loads a checkpoint in the released layout with progress; prints what was left out."""
    from suzuri.tools.self_trace import refuse_too_big

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


def show(console: Console, rows: list[Row], subject: str, against: str = "expected") -> int:
    """Prints the table and the verdict; returns the exit code."""
    title = escape(f"{subject} against {against}")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("item", no_wrap=True)
    table.add_column("largest gap", justify="right", no_wrap=True)
    table.add_column("allowed", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        mark = "[green]ok[/]" if row.ok else "[bold red]FAILED[/]"
        table.add_row(escape(row.name), f"{row.difference:.2e}", row.limit, mark)
    console.print(table)
    failed = [row for row in rows if not row.ok]
    if not rows:
        failed = [Row(name="(nothing)", difference=0.0, limit="", problem="no items to compare")]
    if failed:
        first = failed[0]
        # A plain line: a script reads it, and wrapping or markup would get in its way.
        print(f"FAILED {len(failed)} of {len(rows)} items, first {first.name}: {first.problem}")
        return 1
    print(f"OK: all {len(rows)} items of {subject} are within tolerance")
    return 0
