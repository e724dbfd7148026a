"""`suzuri rl`: everything that a run needs, put together. Read `run_rl`, then `_Run.stepped`."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from suzuri.interrupts import STOPPED, Interrupt, asked_to_stop
from suzuri.rl.config import RlConfig
from suzuri.rl.drawing import Drawing, Played, Recorded, Source, rollouts_of
from suzuri.rl.evaluate import evaluate
from suzuri.rl.http_sampler import HttpSampler, http_sampler
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.loop import Line, Loop, Published
from suzuri.rl.replay import run_replay
from suzuri.rl.rollouts import FOLDER, check_rollouts, save_rollouts
from suzuri.rl.scores import ScoringError
from suzuri.rl.setting import (
    Setting,
    document_of_run,
    find_setting,
    local_sampler,
    scorers_of,
    trainer_of,
)
from suzuri.rl.table import RunTable
from suzuri.rl.transcripts import write_transcripts
from suzuri.training.keeping import Keeper
from suzuri.training.run_dir import RunDir
from suzuri.training.trainer import LocalTrainer
from suzuri.training.viewers import Viewers, check_viewers
from suzuri.types import SamplerLost

STOPPING = "finishing the step and saving"

Evaluation = Callable[[], Awaitable[Line]]


def run_rl(config: RlConfig) -> int:
    """Learns to the end or an interrupt, from the start or the newest state. Returns the exit code.

    Raises ValueError or OSError, before a weight is read, for what cannot be used.
    """
    if config.debug.replay is not None:
        return run_replay(config)
    check_viewers(config)
    table = RunTable(Console(stderr=True))
    setting = find_setting(config)
    problems = config.problems(setting.prompts)
    held_out = config.eval_problems and config.eval_problems(setting.prompts)
    document = document_of_run(config, problems=problems, eval_problems=held_out)
    with RunDir(config.run_dir) as folder:
        folder.compare(document)
        first = folder.start(document)
        if first > config.steps:
            raise ValueError(
                f"steps = {config.steps}: {folder.path} has come to step {first} already; give "
                "more steps, or another run_dir"
            )
        sampler = _remote_sampler(setting, first)
        saved = _saved_rollouts(config, first)
        trainer = trainer_of(setting, folder, first)
        if first:
            table.say(f"going on after step {first} of {folder.path}")
        source: Source
        evaluation: Evaluation | None = None
        if saved is not None:
            source = Recorded(saved, config.algorithm)
        else:
            scorers = scorers_of(setting)
            sampler = sampler or local_sampler(setting, first - 1)
            source = Drawing(setting.config, problems, sampler, scorers)
            if held_out is not None:
                limits = setting.config.limits
                evaluation = partial(evaluate, held_out, sampler, limits, config.evaluation)
        viewers = Viewers(config, folder.path, first)
        run = _Run(setting, folder, viewers, table, evaluation)
        try:
            return run.run(source, trainer, _Weights(trainer, sampler, first), first)
        finally:
            viewers.close()


def _remote_sampler(setting: Setting, first: int) -> HttpSampler | None:
    config = setting.config
    if config.debug.only == "training" or config.sampler == "local":
        return None
    return http_sampler(config, first - 1, config.limits.max_context)


def _saved_rollouts(config: RlConfig, first: int) -> Path | None:
    """The folder that all batches are read from; None where they are drawn."""
    if config.debug.only != "training" or config.debug.rollouts is None:
        return None
    folder = Path(config.debug.rollouts) / FOLDER
    check_rollouts(folder, range(first + 1, config.steps + 1))
    return folder


class _Weights:
    """The trainer's weights on their way to the sampler; without one they are only counted."""

    def __init__(
        self, trainer: LocalTrainer, sampler: LocalSampler | HttpSampler | None, first: int
    ) -> None:
        self._trainer, self._sampler, self._count = trainer, sampler, first - 1

    def version(self) -> int:
        return self._count if self._sampler is None else self._sampler.version

    async def publish(self) -> Published:
        if self._sampler is None:
            self._count += 1
            return Published(version=self._count)
        version = await self._sampler.publish(self._trainer.model)
        return Published(version=version, metrics=publication_metrics(self._sampler.publication))

    async def close(self) -> None:
        if isinstance(self._sampler, HttpSampler):
            await self._sampler.close()


def publication_metrics(found: Mapping[str, float]) -> dict[str, float]:
    """Of what a sampler says of a publication: gigabytes in a second, time in which it waited for
    answers aside, and its parts; `publish/pause_seconds` is that in which nothing was drawn."""
    parts = {name: value for name, value in found.items() if name.endswith("_seconds")}
    busy = sum(value for name, value in parts.items() if name != "wait_seconds")
    line = {f"publish/{name}": value for name, value in parts.items()}
    if busy > 0:
        line["publish/gb_per_second"] = found["bytes"] / 1e9 / busy
    return line


class _Run:
    """Watches a loop: writes, evaluates, saves."""

    def __init__(
        self,
        setting: Setting,
        folder: RunDir,
        viewers: Viewers,
        table: RunTable,
        evaluation: "Evaluation | None",
    ) -> None:
        self._setting, self._config = setting, setting.config
        self._folder, self._viewers, self._table = folder, viewers, table
        self._evaluation = evaluation
        self._keeper: Keeper | None = None

    def run(self, source: Source, trainer: LocalTrainer, weights: _Weights, first: int) -> int:
        """Steps after `first` up to the last. Returns the exit code."""
        config, learns = self._config, self._config.debug.only != "rollouts"
        loop = Loop(config, source, trainer if learns else None, weights.publish, weights.version)
        keeper = Keeper(trainer, self._folder, config.keep)
        self._keeper = keeper if learns else None
        try:
            with asked_to_stop(STOPPING) as interrupt:
                with self._table.running("learning", config.steps, first):
                    step = asyncio.run(self._steps(loop, weights, first, interrupt))
                if learns:
                    keeper.save(step)
                keeper.finish()
            if step < config.steps:
                print(
                    f"stopped after step {step} of {config.steps}; the same command again "
                    f"{keeper.next()}"
                )
                return STOPPED
            if learns:
                keeper.end(step)
        except (FloatingPointError, SamplerLost, ScoringError, OSError) as error:
            print(f"suzuri rl: {keeper.after(str(error))}", file=sys.stderr)
            return 1
        place = self._folder.weights if learns else self._folder.path / FOLDER
        print(f"{step} steps done; {'weights' if learns else 'rollouts'} in {place}")
        return 0

    def drawn(self, step: int, version: int, groups: Sequence[Played]) -> None:
        config = self._config
        every = 1 if config.debug.only == "rollouts" else config.save_rollouts
        if every and step % every == 0:
            save_rollouts(self._folder.path / FOLDER, rollouts_of(step, version, groups))

    async def stepped(self, step: int, line: Line, groups: Sequence[Played]) -> None:
        config = self._config
        if config.transcripts:
            shown, decode = groups[: config.transcripts], self._setting.tokenizer.decode
            write_transcripts(self._folder.path, step, shown, decode)
        is_last = step == config.steps
        if self._evaluation is not None and (is_last or step % config.evaluation.every == 0):
            line |= await self._evaluation()
        self._write(line)
        self._table.show(line, always=is_last or "eval/reward" in line)
        if self._keeper is not None and step % config.save_every == 0:
            self._keeper.save(step)

    async def _steps(self, loop: Loop, weights: _Weights, first: int, interrupt: Interrupt) -> int:
        try:
            await weights.publish()
            if not first and self._evaluation is not None:
                line = {"step": 0} | await self._evaluation()
                self._write(line)
                self._table.show(line)
            return await loop.run(first, self, lambda: interrupt.asked)
        finally:
            await weights.close()

    def _write(self, line: Line) -> None:
        self._folder.write(line)
        self._viewers.write({name: x for name, x in line.items() if x is not None})
