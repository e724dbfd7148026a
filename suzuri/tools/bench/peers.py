"""Other systems on the same shapes in the same run, where they are installed: each in a process of
its own, so that its memory is free again afterwards, and none of its imports touches ours.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from suzuri.tools.bench.cells import Cell

SYSTEMS = ("vllm", "transformers")
MODULES = {
    "vllm": "suzuri.tools.bench.adapter_vllm",
    "transformers": "suzuri.tools.bench.adapter_transformers",
}
TIMEOUT = 1800.0
"""Seconds: a system that needs longer for all cells of a model is given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What an adapter is asked: the config.json of a shape, and cells to time."""

    config: str
    cells: list[dict[str, Any]]
    repeats: int
    steps: int
    token_budget: int
    seed: int


def missing(system: str) -> str:
    """Why a system cannot run here; empty when it can be tried."""
    return "" if importlib.util.find_spec(system) else f"{system} is not installed"


def task_of(
    config: Path, cells: Sequence[Cell], *, repeats: int, steps: int, token_budget: int, seed: int
) -> Task:
    """The cells that other systems can be asked for: no traces, and no skewed routing, which would
    have to reach into their weights."""
    return Task(
        config=str(config),
        cells=[
            dataclasses.asdict(c) for c in cells if c.kind in ("decode", "prefill") and not c.skewed
        ],
        repeats=repeats,
        steps=steps,
        token_budget=token_budget,
        seed=seed,
    )


def run_peer(system: str, task: Task, module: str | None = None) -> dict[str, Any]:
    """{"version", "cells": {name: milliseconds}, "problem"} of an adapter. Never raises for what
    the other system does: its last line of complaint is the problem."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(dataclasses.asdict(task)), "utf-8")
        words = [sys.executable, "-m", module or MODULES[system], str(asked), str(answered)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=TIMEOUT
            )
            complaint = _last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            complaint = f"gave no answer within {TIMEOUT:.0f} s"
        answer: dict[str, Any] = {"version": "unknown", "cells": {}}
        if answered.is_file():  # written after each cell, so also after a failure
            answer = cast(dict[str, Any], json.loads(answered.read_text("utf-8")))
        return answer | {"problem": complaint}


def _last_line(text: str) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["ended without a word"])[-1]
