"""One start of an engine, in a process of its own: `python -m suzuri.tools.bench.startup_run TASK
ANSWER`, two JSON files. startup.py starts it."""

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.load import load_engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.warm_up import warm_up
from suzuri.kernels import cache_folder
from suzuri.processing.tokenizer import Tokenizer

REQUESTS, LONGEST, TOKENS = 24, 1000, 24
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"logprobs": 2, "temperature": 1.0},
    {"presence_penalty": 0.2},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """`folder` holds what is kept between starts: kernels, lists of them, and results of
    self-tests."""

    model: str
    random_weights: bool
    device: str
    engine: dict[str, Any]
    folder: str
    seed: int


def measure(task: Task) -> dict[str, Any]:
    """Seconds from the start of the load to the weights, from there to ready, and from there to the
    first token; seconds of each part of the preparation; `late`: kernels that a small load of mixed
    requests needed and that were not there."""
    late = _watch_kernels(task)
    began = time.monotonic()
    parts: list[tuple[str, float]] = []

    def show(what: str, done: int, total: int) -> None:
        if not parts or parts[-1][0] != what:
            parts.append((what, time.monotonic()))

    engine = load_engine(
        task.model,
        EngineConfig(**task.engine),
        Tokenizer(),
        random_weights=task.random_weights,
        seed=task.seed,
        device=task.device,
        text_only=True,
        preparing=show,
    )
    loaded = time.monotonic()
    weights = parts[0][1] if parts else loaded
    if not parts:
        warm_up(engine)  # as the server does it
    ready = time.monotonic()
    late.clear()
    engine.add("first", [5] * 64, _params(0))
    while not engine.step():
        pass
    first = time.monotonic()
    engine.run()
    ends = [*(at for _, at in parts[1:]), loaded]
    number, seconds = run_load(engine, task.seed)
    return {
        "weights_s": weights - began,
        "ready_s": ready - weights,
        "first_token_s": first - ready,
        "parts_s": {what: end - at for (what, at), end in zip(parts, ends, strict=True)}
        if parts
        else {},
        "recorded_steps": 0 if engine.runner.graphs is None else len(engine.runner.graphs),
        "load_tokens": number,
        "load_s": seconds,
        "late": [*late],
    }


def run_load(engine: Engine, seed: int) -> tuple[int, float]:
    """Mixed requests that come while others run: how many tokens they brought, in seconds."""
    chance = random.Random(seed)
    number, start = 0, time.monotonic()
    longest = min(LONGEST, engine.capacity.max_context - TOKENS - 1)
    rows = engine.model.config.text.unpadded_vocab_size
    for i in range(REQUESTS):
        length = chance.randrange(1, longest)
        prompt = [chance.randrange(min(rows, 500)) for _ in range(length)]
        engine.add(str(i), prompt, _params(i))
        for _ in range(chance.randrange(4)):
            number += len(engine.step())
    number += len(engine.run())
    return number, time.monotonic() - start


def _params(i: int) -> SamplingParams:
    kind = KINDS[i % len(KINDS)]
    return SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True, detokenize=False, **kind)


def _watch_kernels(task: Task) -> list[str]:
    """Names of kernels as they are made or read from disk; both are kept in the task's folder."""
    late: list[str] = []
    folder = Path(task.folder)
    if task.device.startswith("cuda"):
        from triton import knobs  # pyright: ignore[reportMissingTypeStubs]

        def note(**words: Any) -> None:
            late.append(words["repr"])

        knobs.cache.dir = str(folder / "triton")
        knobs.runtime.jit_post_compile_hook = note

    def kept(name: str) -> Path:
        return folder / name

    cache_folder.cache_folder = kept
    return late


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(measure(task)), "utf-8")


if __name__ == "__main__":
    main()
