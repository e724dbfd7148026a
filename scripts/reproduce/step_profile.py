"""What a step of the engine is made of on a GPU: kernels by time and number.

    python scripts/reproduce/step_profile.py benchmarks/shapes/L6E64 decode:1x1024 prefill:1x8192 \\
        --out profile.json

Cells as of `suzuri bench serving`. Of each: the clock per step (decode) or pass (prefill), the
host's time to launch it, the sum of the kernels' times, their number, and the largest of them.
"""

import argparse
import collections
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from suzuri.engine.engine import Engine
from suzuri.model.locate import locate
from suzuri.tools.bench.card import card_for
from suzuri.tools.bench.cells import Cell, cell_named
from suzuri.tools.bench.floors import StepFloors
from suzuri.tools.bench.measure import WARM_PASSES, WARM_STEPS, Bench, begin_decode, params
from suzuri.tools.bench.record import gpu_name, header, write
from suzuri.tools.bench.shapes import decoder_only
from suzuri.tools.bench.state import Load, build_engine
from suzuri.tools.bench.timing import needed_gpu
from suzuri.tools.bench.watch import Watch
from suzuri.tools.bench.weights import draw_model

STEPS = {"decode": 16, "prefill": 2}
SHOWN = 20
BUDGET = 8192


def ready(bench: Bench, cell: Cell) -> tuple[Engine, Watch, Callable[[int], None]]:
    """An engine before the steps that are looked at, and what runs so many of them."""
    if cell.kind == "prefill":
        load = Load(sequences=cell.batch, context=cell.length + 2, token_budget=BUDGET)
        engine, watch = build_engine(bench.model, load, bench.dtype)
        turn = 0

        def passes(count: int) -> None:
            nonlocal turn
            for _ in range(count):
                turn += 1
                for i in range(cell.batch):
                    engine.add(f"{turn} {i}", bench.prompt(cell.length, 2, turn, i), params(1))
                engine.run()

        passes(WARM_PASSES)  # a step is recorded behind the second
        return engine, watch, passes
    engine, watch = begin_decode(bench, cell, 120)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()

    steps(WARM_STEPS)
    return engine, watch, steps


def look(bench: Bench, cell: Cell) -> dict[str, Any]:
    """One cell: the clock without the profiler, then the kernels with it."""
    engine, watch, run = ready(bench, cell)
    count = STEPS[cell.kind]
    torch.cuda.synchronize(bench.device)
    watch.steps.clear()
    start = time.perf_counter()
    run(count)
    torch.cuda.synchronize(bench.device)
    ms = 1e3 * (time.perf_counter() - start) / count
    launch_ms = sum(step.launch_ms for step in watch.steps) / count
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run(count)
        torch.cuda.synchronize(bench.device)
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name[:80]].append(event.device_time)
    total = sum(map(sum, kernels.values()))
    for sequence in list(engine.scheduler.running):
        engine.abort(sequence.request.id)
    engine.run()
    return {
        "cell": cell.name,
        "ms": ms,
        "launch_ms": launch_ms,
        "kernels_ms": total / count / 1e3,
        "launches": sum(map(len, kernels.values())) / count,
        "largest": [
            {"kernel": name, "launches": len(times) / count, "us": sum(times) / count}
            for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN]
        ],
    }


def arguments(text: str | None) -> argparse.ArgumentParser:
    """A model, cells, and where results go, for a script with this docstring."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0] if text else None)
    parser.add_argument("model")
    parser.add_argument("cells", nargs="+", type=cell_named)
    parser.add_argument("--out", type=Path)
    return parser


def bench_of(options: argparse.Namespace) -> Bench:
    """The model, with random weights on the GPU."""
    device = needed_gpu()
    shape = decoder_only(locate(options.model).config)
    card = card_for(None, gpu_name(device))
    if card is None or any(cell.kind not in STEPS for cell in options.cells):
        raise SystemExit("needs a GPU that suzuri plan knows, and decode or prefill")
    return Bench(
        model=draw_model(shape, dtype=torch.bfloat16, device=device, seed=0),
        floors=StepFloors(shape, card),
        dtype="bfloat16",
        repeats=1,
        steps=1,
        requests=1,
        token_budget=BUDGET,
        seed=0,
        tick=lambda _: None,
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    bench = bench_of(options)
    document = header("step profile", bench.device, {"model": options.model}) | {"cells": []}
    for cell in options.cells:
        gc.collect()
        torch.cuda.empty_cache()
        found = look(bench, cell)
        document["cells"].append(found)
        write(options.out, document)
        print(
            f"{cell.name}: {found['ms']:.3f} ms, launching {found['launch_ms']:.3f}, kernels "
            f"{found['kernels_ms']:.3f} in {found['launches']:.0f} launches",
            flush=True,
        )
        for one in found["largest"]:
            print(f"  {one['us']:9.1f} us {one['launches']:6.1f} x  {one['kernel']}")


if __name__ == "__main__":
    main()
