"""`suzuri plot`: curves of metrics.jsonl. matplotlib is loaded when asked for.

A panel for each number; train/loss and eval/loss share one, as all that is called alike.
"""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suzuri.tools.plot_config import PlotConfig
from suzuri.training.run_dir import METRICS, read_metrics
from suzuri.types import is_number

FIRST = ("reward", "sampler_trainer_max", "loss", "draft_loss", "learning_rate", "grad_norm")
STYLES = ("-", "--", ":", "-.")
COLUMNS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of one run against the step."""

    run: str
    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def curves_of(path: str, run: str) -> list[Curve]:
    """The curves of a run's folder or metrics file. Raises ValueError or OSError naming it.

    A last line that was not written to its end is left out.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(path, may_be_cut=True):
        for key, value in line.items():
            if key != "step" and is_number(value):
                points.setdefault(key, []).append((int(line["step"]), float(value)))
    return [
        Curve(run=run, key=key, steps=tuple(s for s, _ in found), values=tuple(v for _, v in found))
        for key, found in points.items()
    ]


def is_wanted(key: str, keys: Sequence[str]) -> bool:
    """Whether a number is among those asked for: by its name, or that of its group."""
    if not keys:
        return not key.startswith("time/")
    return any(key == wanted or key.startswith(wanted.rstrip("/") + "/") for wanted in keys)


def panels(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves by what they are called without their group, the usual ones first."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.key.rpartition("/")[2], []).append(curve)
    order = sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return {name: found[name] for name in order}


def run_plot(config: PlotConfig) -> int:
    """Draws the runs into one PNG. Returns 0. Raises ValueError or OSError in words."""
    curves: list[Curve] = []
    for path, name in zip(config.runs, _names(config.runs), strict=True):
        curves += curves_of(path, name)
    chosen = [curve for curve in curves if is_wanted(curve.key, config.keys)]
    if not chosen:
        there = ", ".join(sorted({curve.key for curve in curves})) or "none"
        raise ValueError(f"{', '.join(config.runs)}: no such numbers; there are {there}")
    draw(panels(chosen), config.out)
    num_runs = len(config.runs)
    print(f"{len(chosen)} curves of {num_runs} run{'s'[: num_runs > 1]} drawn into {config.out}")
    return 0


def _names(paths: Sequence[str]) -> list[str]:
    """What the runs are called: the last part of their paths, or all of it if two are alike."""
    folders = [Path(path).parent if Path(path).name == METRICS else Path(path) for path in paths]
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def draw(found: dict[str, list[Curve]], target: str) -> None:
    """Writes the PNG. Raises ValueError where matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError(
            "drawing needs matplotlib, which is not installed: pip install 'suzuri[plot]'"
        ) from None
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    figure = figures.Figure(figsize=(5 * columns, 3.2 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    runs = list(dict.fromkeys(curve.run for curves in found.values() for curve in curves))
    for place, (name, curves) in zip(axes, found.items(), strict=False):
        keys = list(dict.fromkeys(curve.key for curve in curves))
        for curve in curves:
            # Colour tells the runs apart, the line what is called alike.
            style = STYLES[keys.index(curve.key) % len(STYLES)]
            marker = "o" if len(curve.steps) < 3 or curve.key.startswith("eval/") else ""
            place.plot(
                curve.steps,
                curve.values,
                color=f"C{runs.index(curve.run)}",
                linestyle=style,
                marker=marker,
                markersize=3,
                linewidth=1,
                label=f"{curve.run}: {curve.key}",
            )
        place.set(title=name, xlabel="step")
        place.grid(visible=True, alpha=0.3)
        if len(runs) > 1 or len(keys) > 1:
            place.legend(fontsize="x-small")
        if name == "loss" and min(value for curve in curves for value in curve.values) > 0:
            place.set_yscale("log")
    for place in axes[len(found) :]:
        place.set_axis_off()
    figure.suptitle(", ".join(runs))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, format="png")
