"""How long the GPU stands still between the steps of the engine: scheduling overlaps with them.

    python scripts/reproduce/step_gaps.py benchmarks/shapes/L6E64 decode:1x1024 decode:64x1024 \\
        prefill:1x8192 --out gaps.json --plot gaps.png

The profiler's trace of some decode steps in a row, with the engine's overlap and without, or of
some passes over prompts. Of each: the share of time in which a kernel or copy runs, the time
without one per step, the longest such gaps and what stands on both sides of them, and the clock per
step without the profiler. The plot shows some steps, a bar where the GPU works.
"""

import dataclasses
import gc
import itertools
import json
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from step_profile import arguments, bench_of, ready
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from suzuri.tools.bench.cells import Cell
from suzuri.tools.bench.measure import Bench
from suzuri.tools.bench.record import header, write

STEPS = {"decode": 24, "prefill": 3}
SHOWN_STEPS, LONGEST = 4, 12
Span = tuple[float, float]
Event = tuple[float, float, str]
"""Begin and end in microseconds, and the kernel."""


def busy(spans: Many[Span]) -> list[Span]:
    """The union of intervals (start, end), in order."""
    found: list[list[float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


def gaps(spans: Many[Span], steps: int) -> dict[str, float]:
    """Of the busy intervals of so many steps, in microseconds: see the module."""
    between = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
    whole = spans[-1][1] - spans[0][0]
    return {
        "busy_share": 1 - sum(between) / whole,
        "idle_us_per_step": sum(between) / steps,
        "longest_gap_us": max(between, default=0.0),
        "gaps_over_20_us_per_step": sum(gap > 20 for gap in between) / steps,
    }


def longest(events: Many[Event]) -> list[dict[str, Any]]:
    """The longest times without work, with the names of what ended before and began after."""
    found: list[dict[str, Any]] = []
    end, last = events[0][1], events[0][2]
    for begin, until, name in events:
        if begin > end:
            found.append({"us": begin - end, "after": last, "before": name})
        if until >= end:
            end, last = until, name
    return sorted(found, key=lambda gap: -gap["us"])[:LONGEST]


def look(bench: Bench, cell: Cell, *, overlap: bool) -> tuple[dict[str, Any], list[Span]]:
    """One cell: the clock without the profiler, then the trace with it."""
    count = STEPS[cell.kind]
    engine, _, run = ready(bench, cell)
    engine.config = dataclasses.replace(engine.config, overlap=overlap)
    run(1)
    torch.cuda.synchronize(bench.device)
    start = time.perf_counter()
    run(count)
    torch.cuda.synchronize(bench.device)
    ms = 1e3 * (time.perf_counter() - start) / count
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run(count)
        torch.cuda.synchronize(bench.device)
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name[:80])
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    spans = busy([(begin, end) for begin, end, _ in events])
    for sequence in list(engine.scheduler.running):
        engine.abort(sequence.request.id)
    engine.run()
    found = {"cell": cell.name, "overlap": overlap, "ms": ms} | gaps(spans, count)
    return found | {"longest": longest(events)}, spans


def draw(rows: Many[tuple[str, list[Span], float]], path: Path) -> None:
    """Bars where the GPU works: (label, busy intervals, ms per step) by row."""
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(
        len(rows), 1, figsize=(9, 1.1 * len(rows) + 0.6), squeeze=False, layout="constrained"
    )
    for axes, (label, spans, ms) in zip(all_axes[:, 0], rows, strict=True):
        first = spans[len(spans) // 2][0]
        last = first + 1e3 * ms * SHOWN_STEPS
        shown = [(start - first, end - start) for start, end in spans if first <= start < last]
        axes.broken_barh(shown, (0, 1))
        axes.set_xlim(0, last - first)
        axes.set_yticks([])
        axes.set_title(label, fontsize=9, loc="left")
    all_axes[-1, 0].set_xlabel("microseconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    bench = bench_of(options)
    document = header("step gaps", bench.device, {"model": options.model}) | {"cells": []}
    rows: list[tuple[str, list[Span], float]] = []
    for cell in options.cells:
        for overlap in (True, False) if cell.kind == "decode" else (True,):
            gc.collect()
            torch.cuda.empty_cache()
            found, spans = look(bench, cell, overlap=overlap)
            document["cells"].append(found)
            write(options.out, document)
            print(json.dumps(found, indent=1), flush=True)
            label = f"{cell.name}, {'with' if overlap else 'without'} overlap"
            rows.append((label, spans, found["ms"]))
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
