"""Times of one cell: decode steps behind a filled cache, and prompts from nothing.

A step's time is that of a synchronised clock over many steps of `Engine.step`, scheduling and
sampling included. The device's own time (CUDA events around each step's work) and the host's time
to launch stand beside it.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.inkling import Inkling
from suzuri.tools.bench.cells import Cell
from suzuri.tools.bench.floors import Span, StepFloors
from suzuri.tools.bench.state import Load, build_engine, fill_caches, memory
from suzuri.tools.bench.watch import ExpertLoads, Watch, counted_experts, synchronise

WARM_STEPS = 6
WARM_PASSES = 3
"""Over prompts: counted, not recorded yet, recorded."""
SPREAD_AS_EXPECTED = 0.9
"""Share of the expected different experts below which a floor counts those that were used."""
Tick = Callable[[str], None]
"""Called with a word on what runs now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """One model and how it is measured."""

    model: Inkling
    floors: StepFloors
    dtype: str
    repeats: int
    steps: int
    requests: int
    token_budget: int
    seed: int
    tick: Tick

    @property
    def device(self) -> torch.device:
        return self.model.decoder.norm.weight.device

    def prompt(self, length: int, *stream: int) -> list[int]:
        """Random ids, another prompt for every stream: routing spreads, and no prefix is shared."""
        seed = hash((self.seed, *stream)) % 2**63
        generator = torch.Generator().manual_seed(seed)
        rows = self.model.config.text.unpadded_vocab_size
        ids: list[int] = torch.randint(rows, (length,), generator=generator).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return ids


def params(max_tokens: int) -> SamplingParams:
    """Greedy, and never ended by a token."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def begin_decode(bench: Bench, cell: Cell, tokens: int) -> tuple[Engine, Watch]:
    """An engine whose `batch` sequences have `length` tokens each and may still have `tokens`."""
    context = cell.length + tokens + 1
    budget = cell.batch * (cell.length + 1)
    load = Load(sequences=cell.batch, context=context, token_budget=budget, at_once=True)
    engine, watch = build_engine(
        bench.model, load, bench.dtype, skip_prompts=True, rows=max(cell.batch, 256)
    )
    fill_caches(watch, bench.seed)
    for i in range(cell.batch):
        engine.add(str(i), bench.prompt(cell.length, 1, i), params(tokens))
    while engine.scheduler.num_waiting or any(s.is_prefilling for s in engine.scheduler.running):
        engine.step()
    return engine, watch


def measure_decode(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Steps of `batch` sequences that have `length` tokens each when the first step begins."""
    engine, watch = begin_decode(bench, cell, WARM_STEPS + 2 + bench.repeats * bench.steps)
    bench.tick("warming up")
    with counted_experts(bench.model, watch) as loads:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    synchronise(bench.device)
    watch.steps.clear()
    times: list[float] = []
    for i in range(bench.repeats):
        bench.tick(f"{i + 1} of {bench.repeats}")
        start = time.perf_counter()
        for _ in range(bench.steps):
            engine.step()
        synchronise(bench.device)
        times.append(1e3 * (time.perf_counter() - start) / bench.steps)
    full = [step for step in watch.steps if len(step.spans) == cell.batch]
    assert len(full) == len(watch.steps) == bench.repeats * bench.steps, "a step lacked sequences"
    result = _result(engine, watch, times)
    span = (cell.length, 1, True)
    result |= _floor(bench.floors, [span] * cell.batch, loads)
    result["tokens_per_s"] = 1e3 * cell.batch / result["ms"]
    result["tokens_per_s_per_user"] = 1e3 / result["ms"]
    _end(engine)
    return result


def measure_prefill(bench: Bench, cell: Cell) -> dict[str, Any]:
    """`batch` prompts of `length` tokens that come at the same time, until each has its first
    token: requests checked, scheduled, run in chunks of the token budget."""
    load = Load(sequences=cell.batch, context=cell.length + 2, token_budget=bench.token_budget)
    engine, watch = build_engine(bench.model, load, bench.dtype)
    prompts = [
        [bench.prompt(cell.length, 2, turn, i) for i in range(cell.batch)]
        for turn in range(bench.repeats + WARM_PASSES)
    ]

    def run(turn: int) -> float:
        start = time.perf_counter()
        for i, prompt in enumerate(prompts[turn]):
            engine.add(f"{turn} {i}", prompt, params(1))
        engine.run()
        synchronise(bench.device)
        return 1e3 * (time.perf_counter() - start)

    bench.tick("warming up")
    with counted_experts(bench.model, watch) as loads:
        run(0)
    for turn in range(1, WARM_PASSES):
        run(turn)
    times: list[float] = []
    gpu: list[float] = []
    watch.steps.clear()
    for i in range(bench.repeats):
        bench.tick(f"{i + 1} of {bench.repeats}")
        begun = len(watch.steps)
        times.append(run(i + WARM_PASSES))
        gpu.append(sum(step.gpu_ms or 0.0 for step in watch.steps[begun:]))
    cached = engine.scheduler.counters.cached_tokens
    assert not cached, f"{cached} prompt tokens came from the prefix cache"
    num_steps = len(watch.steps) / bench.repeats
    result = _result(engine, watch, times)
    if result["gpu_ms"] is not None:
        result["gpu_ms"] = statistics.median(gpu)
    result["launch_ms"] = sum(step.launch_ms for step in watch.steps) / bench.repeats
    # One pass over all prompts is the floor: chunks only read the weights more often.
    result |= _floor(bench.floors, [(0, cell.length, True)] * cell.batch, loads)
    result["steps"] = num_steps
    result["tokens_per_s"] = 1e3 * cell.batch * cell.length / result["ms"]
    _end(engine)
    return result


def _result(engine: Engine, watch: Watch, times: list[float]) -> dict[str, Any]:
    """What every cell reports of its repeats."""
    gpu = [ms for step in watch.steps if (ms := step.gpu_ms) is not None]
    return {
        "ms": statistics.median(times),
        "times_ms": times,
        "gpu_ms": statistics.median(gpu) if gpu else None,
        "launch_ms": statistics.median(step.launch_ms for step in watch.steps),
        "memory": memory(watch),
        "engine": dataclasses.asdict(engine.config),
    }


def _floor(floors: StepFloors, spans: list[Span], loads: ExpertLoads) -> dict[str, Any]:
    """The floor for random routing; where clearly fewer experts were used, the floor for those,
    so that nothing looks near its floor because it had less to read."""
    tokens = sum(count for _, count, _ in spans)
    expected = floors.expected_experts(tokens)
    used = statistics.mean(loads.used) if loads.used else None
    experts = used if used is not None and used < SPREAD_AS_EXPECTED * expected else None
    floor = floors.step(spans, experts=experts)
    return {
        "floor_ms": floor.ms,
        "floor_bytes": floor.num_bytes,
        "floor_flops": floor.flops,
        "bound": floor.bound,
        "experts": {
            "expected": expected,
            "used": used,
            "peak_load": statistics.mean(loads.peak) if loads.peak else None,
            "floor_counts_used": experts is not None,
        },
    }


def _end(engine: Engine) -> None:
    """Nothing is left running, and the invariants hold after all that was measured."""
    for sequence in list(engine.scheduler.running):
        engine.abort(sequence.request.id)
    while engine.has_work:
        engine.step()
    engine.check()
