"""A runner that notes what each step held and how long it took, and may leave prompts out.

With `skip_prompts` only the last row of a prompt is computed; the rows before it count as what the
cache holds already (state.py fills it). That is how a step behind 65,536 tokens is reached at once.
"""

import contextlib
import dataclasses
import time
from collections.abc import Generator
from typing import Any

import torch

from suzuri.engine.plan import Plan, Work
from suzuri.engine.runner import Launched, Runner
from suzuri.model.inkling import Inkling
from suzuri.model.moe import MoE
from suzuri.tools.bench.floors import Span


@dataclasses.dataclass(kw_only=True)
class Step:
    """One launched step: its sequences, the host's time to launch it, and on a GPU the events
    before and after its work."""

    spans: list[Span]
    launch_ms: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    @property
    def gpu_ms(self) -> float | None:
        """From the first to the last of its work on the device, which must have ended."""
        return None if self.events is None else self.events[0].elapsed_time(self.events[1])


class Watch:
    """Stands where the engine's runner stands."""

    def __init__(self, runner: Runner, *, skip_prompts: bool = False) -> None:
        self.runner, self.skip_prompts = runner, skip_prompts
        self.steps: list[Step] = []
        self.planned_bytes = 0  # of the engine (state.py)

    def execute(self, plan: Plan) -> Launched:
        if self.skip_prompts:
            works = [_last_row(work) for work in plan.works if work.samples]
            works = works or [_last_row(work) for work in plan.works[:1]]  # a step has rows
            plan = dataclasses.replace(plan, works=works)
        begin = self._event()
        start = time.perf_counter()
        launched = self.runner.execute(plan)
        launch_ms = 1e3 * (time.perf_counter() - start)
        end = self._event()
        self.steps.append(
            Step(
                spans=[(work.start, work.count, work.samples) for work in plan.works],
                launch_ms=launch_ms,
                events=None if begin is None or end is None else (begin, end),
            )
        )
        return launched

    def _event(self) -> torch.cuda.Event | None:
        if self.runner.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.runner.device))
        return event


def _last_row(work: Work) -> Work:
    return dataclasses.replace(work, start=work.start + work.count - 1, count=1)


def synchronise(device: torch.device) -> None:
    """Waits for everything launched on the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass(kw_only=True)
class ExpertLoads:
    """Of each forward and layer: how many different experts were used, and how many times the mean
    load the fullest had."""

    used: list[int] = dataclasses.field(default_factory=list[int])
    peak: list[float] = dataclasses.field(default_factory=list[float])


@contextlib.contextmanager
def counted_experts(model: Inkling, watch: Watch) -> Generator[ExpertLoads]:
    """Counts what the routers choose inside the block. It waits for the device, and recorded steps
    are not replayed: not to be timed."""
    loads = ExpertLoads()
    number = model.config.text.n_routed_experts

    def count(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        counts = torch.bincount(output[0].flatten(), minlength=number)
        loads.used.append(int((counts > 0).sum()))
        loads.peak.append(float(counts.max()) * number / max(int(counts.sum()), 1))

    routers = [block.mlp.router for block in model.decoder.blocks if isinstance(block.mlp, MoE)]
    watch.runner.replays = False
    handles = [router.register_forward_hook(count) for router in routers]
    try:
        yield loads
    finally:
        watch.runner.replays = True
        for handle in handles:
            handle.remove()
