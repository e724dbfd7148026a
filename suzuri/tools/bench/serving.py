"""`suzuri bench serving`: every cell of every model, beside floors and other systems."""

import contextlib
import dataclasses
import gc
import json
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from suzuri.engine.devices import device_named
from suzuri.engine.load import free_memory
from suzuri.log import get_logger
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.locate import Located, locate
from suzuri.model.sizes import Layout, weights_by_part
from suzuri.tools.bench.agents import measure_agents
from suzuri.tools.bench.card import card_for, limits
from suzuri.tools.bench.cells import Cell, chosen_cells, default_cells
from suzuri.tools.bench.config import ServingConfig
from suzuri.tools.bench.floors import StepFloors
from suzuri.tools.bench.measure import Bench, measure_decode, measure_prefill
from suzuri.tools.bench.peers import SYSTEMS, missing, run_peer, task_of
from suzuri.tools.bench.record import gpu_name, header, write
from suzuri.tools.bench.report import show_cells, show_peers
from suzuri.tools.bench.shapes import decoder_only, default_models, recorded
from suzuri.tools.bench.state import GB, DoesNotFit
from suzuri.tools.bench.trace import measure_trace
from suzuri.tools.bench.weights import draw_model, skewed_routing
from suzuri.tools.plan.hardware import Gpu

MEASURES = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "trace": measure_trace,
    "agents": measure_agents,
}
WIDTH = 160
log = get_logger(__name__)


def run_serving(config: ServingConfig) -> int:
    """Measures, prints, and writes --out after each cell. Returns 0, or 1 when no cell could be
    measured. Raises ValueError for what cannot be run."""
    console = Console(stderr=True)
    device = device_named(config.device, f"--device {config.device}")
    card = card_for(config.card, gpu_name(device))
    if card is None:
        raise ValueError(
            f"no limits are known for {gpu_name(device)}; name a card that is like it: --card h200"
        )
    models = config.models or default_models(device.type)
    located = [(model, locate(model)) for model in models]
    document = header("suzuri bench serving", device, dataclasses.asdict(config))
    document |= {"limits": limits(card), "models": {}, "cells": [], "skipped": [], "peers": {}}
    for _, found in located:
        shape = decoder_only(found.config)
        cells = chosen_cells(
            config.cells, default_cells(shape.text.model_max_length, quick=config.quick)
        )
        document["models"][found.name] = {
            "text_config": dataclasses.asdict(shape.text),
            "nvfp4_layers": [] if shape.quantization is None else shape.quantization.layers,
        }
        _measure_model(config, console, device, card, found.name, shape, cells, document)
        if not config.no_peers:
            _measure_peers(config, console, device, found, cells, document)
            write(config.out, document)
    shown = Console()
    if not shown.is_terminal:
        shown = Console(width=WIDTH)  # in a file nothing is cut off
    show_cells(shown, document)
    show_peers(shown, document)
    measured, skipped = len(document["cells"]), len(document["skipped"])
    place = f"; written to {config.out}" if config.out else ""
    print(f"{measured} cells measured, {skipped} skipped{place}")
    return 0 if measured else 1


def _measure_model(
    config: ServingConfig,
    console: Console,
    device: torch.device,
    card: Gpu,
    name: str,
    shape: ModelConfig,
    cells: Sequence[Cell],
    document: dict[str, Any],
) -> None:
    """All cells of one model; what does not fit is named and skipped."""
    with console.status(f"{name}: drawing weights") as status:
        try:
            model = _draw(config, shape, device)
        except DoesNotFit as reason:
            document["skipped"] += [
                {"model": name, "cell": cell.name, "reason": str(reason)} for cell in cells
            ]
            return
        bench = None
        for i, cell in enumerate(cells):
            title = f"{name}: {cell.name} ({i + 1} of {len(cells)})"
            status.update(title)
            bench = Bench(
                model=model,
                floors=StepFloors(shape, card),
                dtype=config.dtype,
                repeats=config.num_repeats,
                steps=config.num_steps,
                requests=config.num_requests,
                token_budget=config.token_budget,
                seed=config.seed,
                tick=lambda word, title=title: status.update(f"{title}: {word}"),
            )
            _measure_cell(bench, device, name, shape, cell, document)
            write(config.out, document)
        del model, bench
    _give_back(device)


def _draw(config: ServingConfig, shape: ModelConfig, device: torch.device) -> Inkling:
    wide = 1 if config.dtype == "bfloat16" else 2
    layers = () if shape.quantization is None else shape.quantization.layers
    needed = wide * sum(weights_by_part(shape, Layout(nvfp4_layers=layers)).values())
    free = free_memory(device)
    if needed > free:
        raise DoesNotFit(f"the weights need {needed / GB:.1f} GB, {free / GB:.1f} are free")
    dtype = getattr(torch, config.dtype)
    return draw_model(shape, dtype=dtype, device=device, seed=config.seed)


def _measure_cell(
    bench: Bench,
    device: torch.device,
    name: str,
    shape: ModelConfig,
    cell: Cell,
    document: dict[str, Any],
) -> None:
    row: dict[str, Any] = {"model": name, "cell": cell.name, **dataclasses.asdict(cell)}
    if cell.kind == "trace":
        row["rate"] = str(cell.rate)  # JSON has no infinity
    routing = skewed_routing(bench.model, bench.seed) if cell.skewed else _as_drawn()
    try:
        with routing:
            row |= MEASURES[cell.kind](bench, cell)
    except (DoesNotFit, torch.OutOfMemoryError) as reason:
        why = str(reason).splitlines()[0]
        document["skipped"].append({"model": name, "cell": cell.name, "reason": why})
        return
    finally:
        _give_back(device)
    if "floor_ms" in row and device.type == "cuda":
        row["share_of_limit"] = row["floor_ms"] / row["ms"]
    row["recorded"] = [
        {**dataclasses.asdict(one), "times_ours": one.ms / row["ms"]}
        if device.type == "cuda"
        else dataclasses.asdict(one)
        for one in recorded(shape, cell)
    ]
    document["cells"].append(row)


@contextlib.contextmanager
def _as_drawn() -> Generator[None]:
    yield


def _give_back(device: torch.device) -> None:
    """What a cell held is free before the next one asks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure_peers(
    config: ServingConfig,
    console: Console,
    device: torch.device,
    located: Located,
    cells: Sequence[Cell],
    document: dict[str, Any],
) -> None:
    """Other systems on the cells that were measured, or in words why not."""
    name = located.name
    done = {row["cell"] for row in document["cells"] if row["model"] == name}
    for system in SYSTEMS:
        why = missing(system)
        if not why and device.type != "cuda":
            why = "compared on a GPU only"
        if why:
            document["peers"].setdefault(system, {})[name] = {"problem": why, "cells": {}}
            continue
        with tempfile.TemporaryDirectory() as folder, console.status(f"{name}: {system}"):
            path = Path(folder) / "config.json"
            if located.folder is not None and (located.folder / path.name).is_file():
                path = located.folder / path.name  # as its makers wrote it
            else:
                path.write_text(json.dumps(decoder_only(located.config).to_dict()), "utf-8")
            task = task_of(
                path,
                [cell for cell in cells if cell.name in done],
                repeats=config.num_repeats,
                steps=config.num_steps,
                token_budget=config.token_budget,
                seed=config.seed,
            )
            answer = run_peer(system, task)
        log.info("%s: %s %s: %d cells", name, system, answer["version"], len(answer["cells"]))
        document["peers"].setdefault(system, {})[name] = answer
