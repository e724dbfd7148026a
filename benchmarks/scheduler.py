"""Host time per step of the scheduler: 256 running sequences, 1000 waiting, prompts of 200-2000.

    python benchmarks/scheduler.py --json benchmarks/results/scheduler.json

No model: tokens are drawn by a stand-in that costs nothing, outside the measured time. Sequences
finish and new ones arrive, so that a step is decode, chunks and admissions mixed. CPU time of this
process (others on the machine do not count) with the collector as it is; after `warm` steps.
Finished requests leave nothing behind but ids of their prompts, up to max_path_tokens: until that
many have passed the times grow a little, then no more.
"""

import argparse
import json
import platform
import random
import statistics
import time
from typing import Any

import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.plan import Plan
from suzuri.engine.runner import Launched
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.transfers import Download
from suzuri.model.config import preset
from suzuri.processing.vocabulary import FullVocabulary


class Nothing:
    """A runner that draws token 1 for every row."""

    def execute(self, plan: Plan) -> Launched:
        sampling = [work for work in plan.works if work.samples]
        ids = torch.ones(len(sampling), dtype=torch.int64)
        return Launched(sampling=sampling, ids=Download([ids]), raw=None, sampled=None, prompts=[])


class Shell:
    config = preset("inkling")


def build(running: int, waiting: int) -> Engine:
    config = EngineConfig(
        max_running=running,
        max_context=16384,
        token_budget=8192,
        global_pages=running * 40,
        local_pages=running * 16,
        snapshots=2 * running,
    )
    shell: Any = Shell()
    runner: Any = Nothing()
    return Engine(shell, config, memory_bytes=1, vocabulary=FullVocabulary(), runner=runner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json")
    options = parser.parse_args()
    engine = build(options.running, options.waiting)
    generator = random.Random(0)
    shared = [[generator.randrange(190_000) for _ in range(1000)] for _ in range(20)]
    added = 0

    def arrive() -> None:
        nonlocal added
        prompt = generator.choice(shared)[: generator.randrange(1000)]
        prompt = prompt + [
            generator.randrange(190_000) for _ in range(generator.randrange(200, 1000))
        ]
        engine.add(str(added), prompt, SamplingParams(max_tokens=generator.randrange(50, 600)))
        added += 1

    schedule: list[float] = []
    whole: list[float] = []
    inner = engine.scheduler.schedule

    def timed() -> Plan:
        start = time.process_time()
        plan = inner()
        schedule.append(time.process_time() - start)
        return plan

    engine.scheduler.schedule = timed  # type: ignore[method-assign]
    for _ in range(options.steps + 500):
        while engine.scheduler.num_waiting < options.waiting:
            arrive()
        start = time.process_time()
        engine.step()
        whole.append(time.process_time() - start)
    schedule, whole = schedule[500:], whole[500:]

    def summary(times: list[float]) -> dict[str, float]:
        ordered = sorted(times)
        return {
            "p50_ms": round(1e3 * statistics.median(ordered), 3),
            "p99_ms": round(1e3 * ordered[int(0.99 * len(ordered))], 3),
            "max_ms": round(1e3 * ordered[-1], 3),
        }

    half = len(schedule) // 2
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "running": options.running,
        "waiting": options.waiting,
        "steps": options.steps,
        "requests": added,
        "schedule": summary(schedule),
        "schedule_first_half": summary(schedule[:half]),
        "schedule_second_half": summary(schedule[half:]),
        "whole_step": summary(whole),
        "counters": vars(engine.scheduler.counters),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
