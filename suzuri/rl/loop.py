"""The loop: sample groups, judge them, train, publish. Read `Loop.run`.

Synchronous and asynchronous are one loop with another `lag`: the batch of a step may be begun once
the weights of `lag` steps before it are published. No torch here.
"""

# pyright: strict

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from suzuri.log import get_logger
from suzuri.rl.config import RlConfig
from suzuri.rl.drawing import Batch, Played, Source
from suzuri.rl.learning import Learner, Line
from suzuri.rl.samples import versions_of
from suzuri.types import Trainer

MOST_WARNINGS = 10
"""Different faults of environments that a run tells of; all are counted and in the transcripts."""

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """Weights that arrived. `metrics`: what it took."""

    version: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


class Watcher(Protocol):
    """Told what happens."""

    def drawn(self, step: int, version: int, groups: Sequence[Played]) -> None:
        """A batch is there, of which nothing is learned yet. `version`: of the weights that draw
        now."""
        ...

    async def stepped(self, step: int, line: Line, groups: Sequence[Played]) -> None:
        """`line`: the metrics; the weights are published."""
        ...


class Loop:
    """`publish` gives the trainer's weights to the sampler; `version`: of those that it has.
    `trainer` None: batches are drawn and shown to the watcher, and nothing is learned."""

    def __init__(
        self,
        config: RlConfig,
        source: Source,
        trainer: Trainer | None,
        publish: Callable[[], Awaitable[Published]],
        version: Callable[[], int],
    ) -> None:
        self.config, self.source = config, source
        self._learner = None if trainer is None else Learner(config, trainer)
        self._publish, self._version = publish, version
        self._batches: dict[int, asyncio.Task[Batch]] = {}
        self._told = set[str]()

    async def run(
        self, first: int, watcher: Watcher, is_stopped: Callable[[], bool] = lambda: False
    ) -> int:
        """Steps after `first`. Returns the last one, or the one after which `is_stopped`. What is
        being drawn for later steps is given up then, and drawn anew by whoever goes on."""
        step = first
        try:
            while step < self.config.steps and not is_stopped():
                step += 1
                await self._step(step, watcher)
        finally:
            for task in self._batches.values():
                task.cancel()
            await asyncio.gather(*self._batches.values(), return_exceptions=True)
            self._batches.clear()
        return step

    async def _step(self, step: int, watcher: Watcher) -> None:
        begin = time.perf_counter()
        for ahead in range(step, min(step + self.config.lag, self.config.steps) + 1):
            if ahead not in self._batches:
                self._batches[ahead] = asyncio.ensure_future(self.source.batch(ahead))
        batch = await self._batches[step]
        del self._batches[step]
        version = self._version() if batch.version is None else batch.version
        watcher.drawn(step, version, batch.played)
        self._warn_of_faults(step, batch.played)
        sampled = time.perf_counter()
        line: Line = {"step": step} | sampling_metrics(batch.played, version)
        line |= await self._learned(step, batch.played)
        learned = time.perf_counter()
        if self._learner is not None:
            published = await self._publish()
            line |= {"sampler/version": float(published.version), **published.metrics}
        end = time.perf_counter()
        line |= {
            "time/sample_seconds": sampled - begin,
            "time/score_seconds": batch.score_seconds,
            "time/train_seconds": learned - sampled,
            "time/publish_seconds": end - learned,
            "time/seconds": end - begin,
            "time/tokens_per_s": line["answers/tokens"] / (end - begin),
        }
        await watcher.stepped(step, line, batch.played)

    def _warn_of_faults(self, step: int, groups: Sequence[Played]) -> None:
        for one in (one for group in groups for one in group.trajectories):
            if one.reward is not None or len(self._told) == MOST_WARNINGS:
                continue
            reason = one.error or "no reason given"
            if one.is_whole:
                reason = "NaN, infinity, a number beyond 1e30 or None was given for it"
            fault = f"{one.status}: {reason[:200]}"
            if fault not in self._told:
                self._told.add(fault)
                log.warning("step %d: an attempt has no reward, %s", step, fault)

    async def _learned(self, step: int, groups: Sequence[Played]) -> Line:
        if self._learner is None:
            return {}
        if self.config.lag:
            # So that the next batches go on being drawn meanwhile.
            return await asyncio.to_thread(self._learner.learn, step, groups)
        return self._learner.learn(step, groups)


def sampling_metrics(groups: Sequence[Played], version: int) -> Line:
    """Of what was drawn. `version`: of the weights that draw now."""
    everyone = [one for group in groups for one in group.trajectories]
    made = [group.made for group in groups]
    rewards = [one.reward for one in everyone if one.reward is not None]
    lengths = [one.num_answer_tokens for one in everyone]
    versions = [v for one in everyone for v in versions_of(one)]
    line: Line = {
        "sample/reward": sum(rewards) / len(rewards) if rewards else None,
        "answers/count": len(everyone),
        "answers/tokens": sum(lengths),
        "answers/tokens:mean": sum(lengths) / max(len(lengths), 1),
        "answers/empty": lengths.count(0),
        "answers/without_reward": len(everyone) - len(rewards),
        "answers/unscored": sum(one.num_unscored for one in made),
        "answers/masked": sum(one.num_masked for one in made),
        "answers/overlong": sum(one.num_overlong for one in made),
        "answers/overlong:penalty": sum(one.penalty for one in made) / max(len(everyone), 1),
        "groups/count": len(groups),
        "groups/flat": sum(one.is_flat for one in made),
    }
    for status in ("truncated", "failed", "timed_out"):
        line[f"answers/{status}"] = sum(one.status == status for one in everyone)
    if versions:
        line["lag/tokens:max"] = version - min(versions)
        line["lag/tokens:mean"] = version - sum(versions) / len(versions)
    return line
