"""Requests that arrive over time: throughput, time to first token, time between tokens.

Prompts of 64 to 8192 tokens and answers of 8 to 256, both even on a logarithmic scale; three of ten
prompts begin with one of four shared texts. Arrivals are a Poisson process of the given rate, or
all at once; a request's clock starts when it arrives, whatever the engine is doing then.
"""

import dataclasses
import itertools
import math
import random
import statistics
import time
from typing import Any

from suzuri.engine.engine import Engine
from suzuri.tools.bench.cells import Cell
from suzuri.tools.bench.measure import Bench, params
from suzuri.tools.bench.state import Load, build_engine, memory, prepare
from suzuri.tools.bench.watch import Watch, synchronise

PROMPTS, ANSWERS = (64, 8192), (8, 256)
SHARED_TEXTS, SHARE = 4, 0.3
RUNNING = 64
WARM_REQUESTS = 8
PRICED_STEPS = 4096
"""Steps whose floors are summed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request: seconds after the start, its prompt, tokens of its answer."""

    at: float
    prompt: list[int]
    answer: int


@dataclasses.dataclass(kw_only=True)
class Seen:
    """When the tokens of a request came, in seconds after the start."""

    at: float
    tokens: list[float] = dataclasses.field(default_factory=list[float])


def arrivals(bench: Bench, rate: float, number: int, stream: int) -> list[Arrival]:
    """The trace of a seed: the same requests for every rate, at other times."""
    draw = random.Random(f"{bench.seed} {stream}")
    most = bench.model.config.text.model_max_length
    longest = min(PROMPTS[1], most // 2)
    answers = (ANSWERS[0], min(ANSWERS[1], most // 4))
    shared = [bench.prompt(longest // 4, 3, stream, i) for i in range(SHARED_TEXTS)]
    found: list[Arrival] = []
    now = 0.0
    for i in range(number):
        length = _between(draw, (min(PROMPTS[0], longest), longest))
        prompt = bench.prompt(length, 4, stream, i)
        if draw.random() < SHARE:
            prompt = (draw.choice(shared) + prompt)[:length]
        found.append(Arrival(at=now, prompt=prompt, answer=_between(draw, answers)))
        now += draw.expovariate(1.0) / rate
    return found


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    low, high = math.log(ends[0]), math.log(ends[1])
    return round(math.exp(draw.uniform(low, high)))


def measure_trace(bench: Bench, cell: Cell) -> dict[str, Any]:
    """One run of the trace, after a shorter one with other prompts."""
    warm = arrivals(bench, math.inf, min(WARM_REQUESTS, bench.requests), 1)
    trace = arrivals(bench, cell.rate, bench.requests, 0)
    context = max(len(item.prompt) + item.answer for item in (*warm, *trace)) + 1
    load = Load(
        sequences=min(RUNNING, bench.requests),
        context=context,
        token_budget=max(bench.token_budget, RUNNING),
    )
    engine, watch = build_engine(bench.model, load, bench.dtype)
    seen: dict[str, Seen] = {}

    def run(items: list[Arrival], name: str) -> float:
        start = time.perf_counter()
        waiting = list(reversed(items))
        while waiting or engine.has_work:
            now = time.perf_counter() - start
            while waiting and waiting[-1].at <= now:
                item = waiting.pop()
                id = f"{name} {len(waiting)}"
                seen[id] = Seen(at=item.at)
                engine.add(id, item.prompt, params(item.answer))
            if not engine.has_work:
                time.sleep(min(waiting[-1].at - now, 0.01))
                continue
            events = engine.step()
            now = time.perf_counter() - start
            for event in events:
                if event.token is not None:
                    seen[event.sequence.request.id].tokens.append(now)
        synchronise(bench.device)
        return time.perf_counter() - start

    bench.tick("warming up")
    prepare(engine, watch)
    run(warm, "warm")
    seen.clear()
    watch.steps.clear()
    counters = engine.scheduler.counters
    before = dataclasses.replace(counters)
    bench.tick(f"{len(trace)} requests")
    seconds = run(trace, "trace")
    engine.check()
    lengths = sum(len(item.prompt) for item in trace), sum(item.answer for item in trace)
    assert sum(len(one.tokens) for one in seen.values()) == lengths[1], "tokens are missing"
    first = [one.tokens[0] - one.at for one in seen.values()]
    gaps = [b - a for one in seen.values() for a, b in itertools.pairwise(one.tokens)]
    return {
        "seconds": seconds,
        "requests": len(trace),
        "prompt_tokens": lengths[0],
        "answer_tokens": lengths[1],
        "cached_tokens": counters.cached_tokens - before.cached_tokens,
        "preemptions": counters.preemptions - before.preemptions,
        "tokens_per_s": lengths[1] / seconds,
        "all_tokens_per_s": sum(lengths) / seconds,
    } | over_time(bench, engine, watch, first, gaps)


def over_time(
    bench: Bench, engine: Engine, watch: Watch, first: list[float], gaps: list[float]
) -> dict[str, Any]:
    """What requests that came one after another saw, the seconds to their first tokens and between
    further ones, and what the steps took for it."""
    gpu = [ms for step in watch.steps if (ms := step.gpu_ms) is not None]
    priced = [step for step in watch.steps if step.spans][:PRICED_STEPS]
    between = statistics.median(gaps)
    return {
        "ms": 1e3 * between,
        "steps": len(watch.steps),
        "tokens_per_s_per_user": 1.0 / between,
        "first_token_ms": percentiles(first),
        "between_tokens_ms": percentiles(gaps),
        "gpu_ms": statistics.median(gpu) if gpu else None,
        "launch_ms": statistics.median(step.launch_ms for step in watch.steps),
        # Of all of it: every step at its own floor, one after another.
        "floor_s": sum(bench.floors.step(step.spans).ms for step in priced) / 1e3,
        "floor_steps": len(priced),
        "memory": memory(watch),
        "engine": dataclasses.asdict(engine.config),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Some, and the largest, in milliseconds."""
    ordered = sorted(seconds)
    place = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    last = len(ordered) - 1
    found = {name: ordered[min(int(p * len(ordered)), last)] for name, p in place.items()}
    return {name: 1e3 * value for name, value in found.items()} | {"max": 1e3 * ordered[last]}
