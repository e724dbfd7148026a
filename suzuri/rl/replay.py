"""Learning once more what a step learned, to see that the same comes of it."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suzuri.rl.config import DebugConfig, RlConfig
from suzuri.rl.drawing import Played, Recorded
from suzuri.rl.loop import Line, Loop, Published
from suzuri.rl.rollouts import FOLDER, check_rollouts
from suzuri.rl.setting import document_of_run, find_setting, trainer_of
from suzuri.training.run_dir import METRICS, RunDir, read_metrics

OTHERS = ("time/", "publish/", "eval/")
"""Numbers that do not follow from a batch and the weights before it."""


def run_replay(config: RlConfig) -> int:
    """`debug.replay` (config.py). Returns the exit code. Raises ValueError or OSError for a run
    that cannot be used."""
    step = config.debug.replay
    assert step is not None
    if step > config.steps:
        raise ValueError(f"debug.replay = {step}: the run has {config.steps} steps")
    folder = RunDir(config.run_dir)
    folder.compare(document_of_run(dataclasses.replace(config, debug=DebugConfig())))
    recorded = _recorded(folder.path / METRICS, step)
    first = max((state for state in folder.states() if state < step), default=0)
    rollouts = Path(config.debug.rollouts or folder.path) / FOLDER
    check_rollouts(rollouts, range(first + 1, step + 1))
    setting = find_setting(config)
    trainer = trainer_of(setting, folder, first)
    counted = iter(range(first + 1, step + 1))

    async def publish() -> Published:
        return Published(version=next(counted))

    lines = _Lines()
    source = Recorded(rollouts, config.algorithm)
    # Without a lag: whatever there was of it is in the batches.
    loop = Loop(dataclasses.replace(setting.config, lag=0), source, trainer, publish, lambda: first)
    asyncio.run(loop.run(first, lines, lambda: len(lines.found) == step - first))
    differences = compared(recorded, lines.found[-1])
    for name, (before, now) in differences.items():
        print(f"step {step}: {name} was {before!r}, is {now!r}")
    if differences:
        return 1
    print(f"step {step}: all numbers are the same (from the state of step {first})")
    return 0


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Numbers of two lines of metrics that differ or are in one alone, times aside."""
    names = [name for name in {**before, **now} if not name.startswith(OTHERS)]
    # As they are in the file.
    now = json.loads(json.dumps(now))
    return {
        name: (before.get(name), now.get(name))
        for name in names
        if repr(before.get(name)) != repr(now.get(name))
    }


def _recorded(path: Path, step: int) -> Line:
    if not path.is_file():
        raise ValueError(f"{path} is not there: run_dir must be that of the run to replay")
    for line in read_metrics(path):
        if line["step"] == step:
            return line
    raise ValueError(f"debug.replay = {step}: {path} has no such step")


class _Lines:
    """Keeps the metrics."""

    def __init__(self) -> None:
        self.found: list[Line] = []

    def drawn(self, step: int, version: int, groups: Sequence[Played]) -> None:
        """They were drawn long ago."""

    async def stepped(self, step: int, line: Line, groups: Sequence[Played]) -> None:
        self.found.append(line)
