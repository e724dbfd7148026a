"""Engines for a cell: pools that hold just what it needs, and caches full of finite numbers."""

import dataclasses
from typing import Any, cast

import torch

from suzuri.engine.capacity import Capacity, capacity, engine_sizes, state_bytes
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.load import free_memory, prepare_engine
from suzuri.engine.runner import Runner
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.bench.watch import Watch
from suzuri.tools.bench.weights import fill_normal

GB = 1e9


class DoesNotFit(Exception):
    """A cell needs more than the device or the model has; in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a cell asks of an engine. `at_once`: prompts get all their pages in one step."""

    sequences: int
    context: int
    """Longest sequence, prompt and answer."""
    token_budget: int
    at_once: bool = False


def engine_config(model: ModelConfig, load: Load, dtype: str) -> EngineConfig:
    """Default settings of an engine with pools for this load, prefix cache included."""
    size, text = 128, model.text
    blocks = -(-load.context // size) + 1
    window = max(
        (text.attention(layer).window or 0 for layer in range(text.num_hidden_layers)), default=0
    )
    snapshots = load.sequences + min(load.sequences, 64)
    ring = (window + 1) // size + 3
    # Admission keeps a page for each that runs, up to a sixteenth of the pool.
    headroom = load.sequences + 16
    if load.at_once:  # nothing ends before the cell does, so points share what runs
        global_pages, local_pages = (load.sequences * (blocks + n) + headroom for n in (1, 2))
    else:
        global_pages = 2 * load.sequences * blocks + headroom
        budget_pages = -(-load.token_budget // size)
        local_pages = (load.sequences + snapshots) * ring + budget_pages + headroom
    return EngineConfig(
        dtype=cast(Any, dtype),
        max_context=load.context,
        max_running=load.sequences,
        token_budget=max(load.token_budget, load.sequences),
        page_size=size,
        global_pages=global_pages + global_pages // 15,
        local_pages=local_pages + local_pages // 15,
        snapshots=snapshots,
    )


def planned_bytes(
    model: ModelConfig, config: EngineConfig, found: Capacity, rows: int, *, on_gpu: bool
) -> int:
    """Weights, buffers and graphs of steps of `rows` rows, and state, by the sizes of `suzuri
    plan`."""
    wide = 1 if config.dtype == "bfloat16" else 2
    sizes = engine_sizes(model, 0, rows, on_gpu=on_gpu, graph_tokens=found.graph_tokens)
    # In place of the plan's local pages in flight the pool counts, by its real size.
    workspace = sum(n for name, n in sizes.workspace.items() if name != "local KV in flight")
    tables = sizes.lines(1, config.max_running)
    by_load = sum(line.num_bytes for line in tables if line.name in ("sampling tables", "graphs"))
    state = sum(state_bytes(model, config, found).values())
    return wide * (sum(sizes.weights.values()) + workspace) + by_load + state


def memory(watch: Watch) -> dict[str, int | None]:
    """Bytes that an engine was to need at most, weights included; and on a GPU the most that torch
    held since it was built, what recorded steps keep for themselves included."""
    device = watch.runner.device
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return {"planned_bytes": watch.planned_bytes, "peak_bytes": peak}


def build_engine(
    model: Inkling, load: Load, dtype: str, *, skip_prompts: bool = False, rows: int | None = None
) -> tuple[Engine, Watch]:
    """An engine under watch. `rows` that one step computes at most, where that is less than the
    token budget. Raises DoesNotFit before anything is allocated."""
    most = model.config.text.model_max_length
    if load.context > most:
        raise DoesNotFit(f"needs {load.context} tokens of context, the model has {most}")
    config = engine_config(model.config, load, dtype)
    device = model.decoder.norm.weight.device
    on_gpu = device.type == "cuda"
    found = capacity(model.config, config, 0, on_gpu=on_gpu)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    most_rows = rows or config.token_budget
    needed = planned_bytes(model.config, config, found, most_rows, on_gpu=on_gpu)
    # torch keeps what earlier cells gave back; it can be had as well.
    kept = 0
    if on_gpu:
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = free_memory(device) + held + kept
    if needed > free:
        raise DoesNotFit(f"needs {needed / GB:.1f} GB, there are {free / GB:.1f}")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    watch = Watch(Runner(model, config, found), skip_prompts=skip_prompts)
    watch.planned_bytes = needed
    engine = Engine(
        model,
        config,
        memory_bytes=free,
        vocabulary=FullVocabulary(),
        runner=cast(Any, watch),
    )
    return engine, watch


def prepare(engine: Engine, watch: Watch) -> None:
    """What a server does before its first request: kernels compiled, steps recorded (on a GPU)."""
    engine.runner = watch.runner
    prepare_engine(engine)
    engine.runner = cast(Any, watch)
    watch.steps.clear()


def fill_caches(watch: Watch, seed: int) -> None:
    """Random finite numbers in every page and conv ring, as a long past would have left: keys of
    size 1 per channel as after their norm, the others likewise. Zeros would be quicker to read."""
    cache = watch.runner.cache
    generator = torch.Generator(watch.runner.device).manual_seed(seed)
    for layer in cache.layers:
        fill_normal(layer.k_pages_PTUC, generator)
        fill_normal(layer.v_pages_PTUC, generator)
        for ring in (layer.kv_conv_LRC, layer.attn_conv_LRC, layer.mlp_conv_LRC):
            fill_normal(ring, generator)
