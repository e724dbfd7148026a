"""`suzuri trace`: our numbers against a golden folder's, item by item, as a table.

The verdict is the last line, and names the first item that fails. golden.py computes our side,
media_trace.py the preprocessing's, self_trace.py what has no expected numbers.
"""

from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from suzuri.model.checkpoint_files import scan
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.tools.golden import compute, record_problem
from suzuri.tools.loading import load_model, read_records
from suzuri.tools.media_trace import trace_media
from suzuri.tools.rows import Row, compare, tolerance
from suzuri.tools.self_trace import self_checks, trace_shape
from suzuri.tools.trace_config import TraceConfig

LAYOUT_FOLDERS = {"released": "original", "transformers": "transformers"}
INPUTS = ("input_ids", "pixel_values", "audio.bins", "hidden_in")
"""How the names of what is given to the model end."""
TOWER_ITEMS = ("vision.", "audio.", "mm.")
"""Golden items that need a tower."""
NOT_COMPARED = ("mtp.raw.",)
"""`raw` feeds the drafts un-normed embeddings, as one other package does; the model does not."""


def run_trace(config: TraceConfig) -> int:
    """Runs one trace and prints its table. Returns the exit code (0, or 1 when an item fails).

    Raises ValueError or OSError where the input cannot be used, naming the file and the fix.
    """
    console = Console()
    if config.random_weights:
        return show(console, trace_shape(config, console), "the shape", "itself")
    assert config.model is not None
    folder = Path(config.model)
    if (folder / "media.safetensors").exists():
        refuse_unused_flags(config)
        for flag, is_given in (("--layout", config.layout), ("--text-only", config.text_only)):
            if is_given:
                raise ValueError(f"{flag} has no effect on a folder without checkpoints")
        return show(console, trace_media(folder), str(folder))
    if not folder.is_dir() or (folder / "config.json").exists():
        if config.layout is not None:
            raise ValueError("--layout chooses within a golden folder; files tell their own layout")
        located = locate(config.model, weights=True)
        model, _ = load_model(located.checkpoint(), config.dtype, console, config.want)
        return show(console, self_checks(model, config, console), config.model, "itself")
    refuse_unused_flags(config)
    expected = read_records(folder / "expected.safetensors")
    if config.text_only:
        towers = [name for name in expected if name.startswith(TOWER_ITEMS)]
        compared = [name for name in towers if not name.endswith(INPUTS)]
        console.print(f"towers: {len(compared)} items skipped, --text-only")
        expected = {name: value for name, value in expected.items() if name not in towers}
    layout = config.layout or "released"
    checkpoint = folder / LAYOUT_FOLDERS[layout]
    model, report = load_model(scan(checkpoint), config.dtype, console, config.want)
    # That layout has no place for draft depths; in the other one their absence is a fault.
    without_drafts = layout == "transformers" and "mtp" not in report.parts
    refuse_other_model(model, expected, folder / "expected.safetensors", checkpoint)
    with console.status("") as status:
        got = compute(model, expected, lambda part: status.update(f"running {part}"))
    rows = golden_rows(got, expected, console, without_drafts=without_drafts)
    return show(console, rows, str(folder))


def refuse_unused_flags(config: TraceConfig) -> None:
    """A flag that would have no effect must not look as if it had one."""
    if config.num_tokens is not None or config.seed is not None:
        raise ValueError("--num-tokens and --seed have no effect on a folder with expected numbers")


def golden_rows(
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    console: Console,
    *,
    without_drafts: bool = False,
) -> list[Row]:
    """One row per expected item, in the order in which the model computes them."""
    order = {name: i for i, name in enumerate(got)}
    names = [n for n in expected if not n.endswith(INPUTS) and not n.startswith(NOT_COMPARED)]
    skipped = [n for n in expected if n.startswith(NOT_COMPARED)]
    if skipped:
        console.print(
            f"not compared: {len(skipped)} items {NOT_COMPARED[0]}* (another package's variant)"
        )
    drafts = [n for n in names if n.startswith("mtp.")]
    if without_drafts and drafts:
        console.print(f"mtp: {len(drafts)} items skipped, the transformers layout has no drafts")
        names = [n for n in names if n not in drafts]
    names.sort(key=lambda name: (order.get(name, len(order)), name))
    return [compare(name, got.get(name), expected[name], tolerance(name)) for name in names]


def refuse_other_model(
    model: Inkling, expected: dict[str, Tensor], records: Path, checkpoint: Path
) -> None:
    """Raises ValueError naming file and item when the records cannot be this checkpoint's."""
    problem = record_problem(model, expected)
    if problem:
        raise ValueError(f"{records}: {problem}; are these the records of {checkpoint}?")


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
