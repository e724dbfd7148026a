"""Tables of `suzuri bench serving`, from what goes into the result file."""

from typing import Any, cast

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = (
    "cell",
    "ms",
    "GPU ms",
    "launch ms",
    "floor ms",
    "share",
    "tokens/s",
    "experts",
)
OTHERS = "others, ms"
EXPLAINED = (
    "ms: synchronised clock, whole steps (decode: one step; prefill: until every prompt has its "
    "first token; trace, agents: median between tokens). share: floor / ms. experts: different "
    "ones a layer used, of those expected for random routing; * where the floor counts those used."
)


def show_cells(console: Console, document: dict[str, Any]) -> None:
    """One table per model, then what was skipped and why."""
    on_gpu = document["hardware"]["device"] == "cuda"
    where = document["hardware"]["gpu"] or f"CPU, {document['hardware']['threads']} threads"
    for model in document["models"]:
        rows = [row for row in document["cells"] if row["model"] == model]
        if not rows:
            continue
        table = Table(
            box=box.SIMPLE_HEAD, title=escape(f"{model} on {where}"), title_justify="left"
        )
        for name in (*COLUMNS, OTHERS):
            table.add_column(name, justify="left" if name in ("cell", OTHERS) else "right")
        for row in rows:
            table.add_row(*map(escape, _words(row, document)))
        console.print(table)
    console.print(EXPLAINED, markup=False)
    if not on_gpu:
        card = document["limits"]["card"]
        console.print(
            f"Measured on a CPU: compare these figures with each other only; floors are of {card}.",
            markup=False,
        )
    for row in document["skipped"]:
        text = f"skipped {row['model']} {row['cell']}: {row['reason']}"
        console.print(text, markup=False)


def _words(row: dict[str, Any], document: dict[str, Any]) -> list[str]:
    experts = cast(dict[str, Any], row.get("experts") or {})
    used = experts.get("used")
    shown = "" if used is None else f"{used:.0f} of {experts['expected']:.0f}"
    if experts.get("floor_counts_used"):
        shown += " *"
    return [
        row["cell"],
        _number(row["ms"]),
        _number(row.get("gpu_ms")),
        _number(row.get("launch_ms")),
        _number(row.get("floor_ms")),
        _percent(row.get("share_of_limit")),
        f"{row['tokens_per_s']:,.0f}",
        shown,
        "; ".join(_others(row, document)),
    ]


def _others(row: dict[str, Any], document: dict[str, Any]) -> list[str]:
    found = [f"{one['system']} {_number(one['ms'])} (recorded)" for one in row["recorded"]]
    if "first_token_ms" in row:
        found.append(f"first token after {_number(row['first_token_ms']['p50'])}")
    if "hit_rate" in row:
        shares = _percent(row["hit_rate"]), _percent(row["hit_of_prompt"])
        found.append("cached {} of what is shared, {} of prompts".format(*shares))
    for system, models in document["peers"].items():
        answer = models.get(row["model"], {})
        if row["cell"] in answer.get("cells", {}):
            ms = answer["cells"][row["cell"]]
            found.append(f"{system} {answer['version']} {_number(ms)} (now)")
    return found


def show_peers(console: Console, document: dict[str, Any]) -> None:
    """Which other systems did not run, and why."""
    for system, models in document["peers"].items():
        problems = {answer["problem"] for answer in models.values()}
        for problem in sorted(problems - {""}):
            console.print(f"not compared in this run: {system}: {problem}", markup=False)


def _number(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
