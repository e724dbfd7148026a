"""`suzuri bench plot`: pictures of result files. matplotlib is loaded when asked for.

Left: tokens/s per GPU against tokens/s per user, the decode cells of one context joined by batch,
and traces as single points. Right: the time between tokens by batch.
"""

import collections
import dataclasses
import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from suzuri.tools.bench.config import PlotConfig

STYLES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of one system: `batch` 0 for a trace; rates in tokens per second."""

    series: str
    system: str
    batch: int
    ms: float
    per_user: float
    per_gpu: float


def points_of(document: dict[str, Any]) -> list[Point]:
    """The decode cells and traces of a result file, ours and those of other systems."""
    gpus = max(int(document["hardware"]["num_gpus"]), 1)
    found: list[Point] = []
    for row in cast(list[dict[str, Any]], document["cells"]):
        name = row["model"]
        if row["kind"] == "trace":
            found.append(
                Point(
                    series=f"{name}, traces",
                    system="suzuri",
                    batch=0,
                    ms=row["ms"],
                    per_user=row["tokens_per_s_per_user"],
                    per_gpu=row["tokens_per_s"] / gpus,
                )
            )
        if row["kind"] != "decode":
            continue
        series = f"{name}, {row['length']:,} tokens" + (", skewed" if row["skewed"] else "")
        times = {"suzuri": row["ms"]}
        times |= {f"{one['system']} (recorded)": one["ms"] for one in row["recorded"]}
        peers = cast(dict[str, dict[str, Any]], document["peers"])
        for system, models in peers.items():
            answer = cast(dict[str, Any], models.get(name) or {})
            if row["cell"] in answer.get("cells", {}):
                times[f"{system} {answer['version']}"] = answer["cells"][row["cell"]]
        for system, ms in times.items():
            found.append(
                Point(
                    series=series,
                    system=system,
                    batch=row["batch"],
                    ms=ms,
                    per_user=1e3 / ms,
                    per_gpu=1e3 * row["batch"] / ms / gpus,
                )
            )
    return found


def frontier(points: Iterable[Point]) -> list[Point]:
    """Those that no other beats in one rate without losing in the other, by falling per_user."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.per_user, -p.per_gpu)):
        if not best or point.per_gpu > best[-1].per_gpu:
            best.append(point)
    return best


def read(path: str) -> dict[str, Any]:
    """A result file. Raises ValueError naming it when it is something else."""
    try:
        document: Any = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    found = cast(dict[str, Any], document if isinstance(document, dict) else {})
    if found.get("what") != "suzuri bench serving":
        raise ValueError(f"{path} is not a file that suzuri bench serving --out wrote")
    return found


def run_plot(config: PlotConfig) -> int:
    """Draws the files into one PNG. Returns 0. Raises ValueError or OSError in words."""
    documents = [read(path) for path in config.files]
    points = [point for document in documents for point in points_of(document)]
    if not points:
        raise ValueError(f"{', '.join(config.files)}: no decode cell and no trace to draw")
    machines = {document["hardware"]["gpu"] or "CPU" for document in documents}
    commits = {document["commit"] for document in documents}
    draw(points, f"{', '.join(sorted(machines))}; commit {', '.join(sorted(commits))}", config.out)
    print(f"{len(points)} points drawn into {config.out}")
    return 0


def draw(points: Sequence[Point], title: str, target: str) -> None:
    """Writes the PNG. Raises ValueError where matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        tickers: Any = importlib.import_module("matplotlib.ticker")
    except ImportError:
        raise ValueError(
            "drawing needs matplotlib, which is not installed: pip install 'suzuri[plot]'"
        ) from None
    figure = figures.Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = list(dict.fromkeys(point.series for point in points))
    systems = list(dict.fromkeys(point.system for point in points))
    groups: dict[tuple[str, str], list[Point]] = collections.defaultdict(list)
    for point in points:
        groups[point.series, point.system].append(point)
    for (name, system), members in groups.items():
        # Colour tells the cells apart, the line the systems.
        look: dict[str, Any] = {
            "color": f"C{series.index(name)}",
            "linestyle": STYLES[systems.index(system) % len(STYLES)],
            "marker": "o" if system == "suzuri" else "x",
        }
        edge = frontier(members)
        label = f"{name}: {system}"
        left.plot([p.per_user for p in edge], [p.per_gpu for p in edge], label=label, **look)
        decodes = sorted((p for p in members if p.batch), key=lambda p: p.batch)
        if decodes:
            right.plot([p.batch for p in decodes], [p.ms for p in decodes], **look)
    left.set(xlabel="tokens/s per user", ylabel="tokens/s per GPU", xscale="log", yscale="log")
    right.set(xlabel="batch", ylabel="ms between tokens", yscale="log")
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            if axis is not right.xaxis:
                # 1, 2 and 5 of every decade have a name: more run into each other.
                axis.set_major_locator(tickers.LogLocator(subs=(1, 2, 5)))
                axis.set_minor_formatter(tickers.NullFormatter())
            axis.set_major_formatter("{x:g}")
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, format="png")
