"""What the adapters of other systems share: the task, prompts, medians, the answer so far."""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suzuri.tools.bench.cells import Cell
from suzuri.tools.bench.peers import Task


def read_task(path: str) -> Task:
    return Task(**json.loads(Path(path).read_text("utf-8")))


def cells_of(task: Task) -> list[Cell]:
    return [Cell(**fields) for fields in task.cells]


def vocabulary(task: Task) -> int:
    """Rows of the vocabulary that mean something."""
    text = json.loads(Path(task.config).read_text("utf-8"))["text_config"]
    return int(text.get("unpadded_vocab_size") or text["vocab_size"])


def prompts(task: Task, cell: Cell, turn: int) -> list[list[int]]:
    """Random ids, other ones in every turn."""
    draw = random.Random(f"{task.seed} {cell.name} {turn}")
    rows = vocabulary(task)
    return [[draw.randrange(rows) for _ in range(cell.length)] for _ in range(cell.batch)]


@dataclasses.dataclass(kw_only=True)
class Answer:
    """Written after each cell, so that a system that gives up later has answered this far."""

    path: Path
    version: str
    cells: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    skipped: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def put(self, cell: Cell, ms: float) -> None:
        self.cells[cell.name] = ms
        self.write()

    def skip(self, cell: Cell, why: str) -> None:
        self.skipped[cell.name] = why
        self.write()

    def write(self) -> None:
        fields: dict[str, Any] = {
            "version": self.version,
            "cells": self.cells,
            "skipped": self.skipped,
        }
        self.path.write_text(json.dumps(fields), "utf-8")


def time_cell(
    task: Task,
    cell: Cell,
    generate: Callable[[list[list[int]], int], None],
    wait: Callable[[], None],
) -> float:
    """Milliseconds of a cell by `generate(prompts, tokens)`, which waits for all its tokens: one
    token is prefill; a decode step is what each further one costs. Warmed up; median."""

    def run(turn: int, tokens: int) -> float:
        given = prompts(task, cell, turn)
        wait()
        start = time.perf_counter()
        generate(given, tokens)
        wait()
        return 1e3 * (time.perf_counter() - start)

    most = task.steps + 1 if cell.kind == "decode" else 1
    run(0, most)
    run(1, 1)
    times: list[float] = []
    for i in range(task.repeats):
        one = run(2 * i + 2, 1)
        times.append(one if most == 1 else (run(2 * i + 3, most) - one) / task.steps)
    return statistics.median(times)
