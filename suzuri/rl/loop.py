"""The loop: sample groups, judge them, train, publish. Read `Loop.run`.

Synchronous and asynchronous are one loop with another `lag`: the batch of a step may be begun once
the weights of `lag` steps before it are published. No torch here.
"""

# pyright: strict

import asyncio
import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from suzuri.envs.env import Problems, Trajectory
from suzuri.envs.rollout import Limits, play_group
from suzuri.rl.algorithms.group import Algorithm, Made
from suzuri.rl.consistency import Agreement
from suzuri.rl.correction import Correction
from suzuri.rl.samples import samples_of, versions_of
from suzuri.types import AdamParams, ForwardOutput, Sample, Sampler, Trainer

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How much is sampled and learned in a step. Raises ValueError naming the field."""

    steps: int
    """Optimizer steps in all, times `minibatches`."""

    groups: int = 16
    """Problems of a step."""

    group_size: int = 8
    """Attempts at each."""

    minibatches: int = 1
    """Optimizer steps on a batch."""

    lag: int = 0
    """Steps by which the weights that draw may be behind those that learn. 0: a batch is drawn,
    learned and published before the next one begins."""

    skip_flat: bool = False
    """Draw more problems until `groups` of them say something (Yu et al., "DAPO", 2025: dynamic
    sampling), at most `most_rounds` times as many."""

    most_rounds: int = 4

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "group_size", "minibatches", "most_rounds"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        if type(self.lag) is not int or self.lag < 0:
            raise ValueError(f"lag = {self.lag!r}: must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A problem that was attempted, and what the algorithm made of it."""

    name: str
    trajectories: Sequence[Trajectory]
    made: Made


class Watcher(Protocol):
    """Told what happens, after every step."""

    async def stepped(self, step: int, line: Line, played: Sequence[Played]) -> None:
        """`line`: the metrics; the weights are published."""
        ...


class Loop:
    """`publish` gives the trainer's weights to the sampler. `params(step)`: of the optimizer."""

    def __init__(
        self,
        schedule: Schedule,
        limits: Limits,
        problems: Problems,
        algorithm: Algorithm,
        sampler: Sampler,
        trainer: Trainer,
        publish: Callable[[], Awaitable[int]],
        params: Callable[[int], AdamParams],
        *,
        correction: Correction | None = None,
    ) -> None:
        self.schedule, self.limits, self.problems = schedule, limits, problems
        self.algorithm, self.sampler, self.trainer = algorithm, sampler, trainer
        self.correction = correction or Correction()
        self._publish, self._params = publish, params
        self._batches: dict[int, asyncio.Task[list[Played]]] = {}

    async def run(
        self, first: int, watcher: Watcher, is_stopped: Callable[[], bool] = lambda: False
    ) -> int:
        """Steps after `first`. Returns the last one, or the one after which `is_stopped`."""
        step = first
        try:
            while step < self.schedule.steps and not is_stopped():
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
        last = min(step + self.schedule.lag, self.schedule.steps)
        for ahead in range(step, last + 1):
            if ahead not in self._batches:
                self._batches[ahead] = asyncio.ensure_future(self._sample(ahead))
        played = await self._batches[step]
        del self._batches[step]
        sampled = time.perf_counter()
        line: Line = {"step": step} | self._sampling_metrics(played)
        if self.schedule.lag:
            # So that the next batches go on being drawn meanwhile.
            line |= await asyncio.to_thread(self._learn, step, played)
        else:
            line |= self._learn(step, played)
        learned = time.perf_counter()
        line["sampler/version"] = float(await self._publish())
        end = time.perf_counter()
        line |= {
            "time/sample_seconds": sampled - begin,
            "time/train_seconds": learned - sampled,
            "time/publish_seconds": end - learned,
            "time/seconds": end - begin,
        }
        await watcher.stepped(step, line, played)

    # Sampling

    async def _sample(self, step: int) -> list[Played]:
        """The batch of a step. Which problems, and what is drawn, depends on the step's number and
        the weights alone."""
        schedule = self.schedule
        rounds = schedule.most_rounds if schedule.skip_flat else 1
        first, found = (step - 1) * schedule.groups * rounds, list[Played]()
        wanted = schedule.groups
        while wanted > 0 and len(found) < schedule.groups * rounds:
            count = min(wanted, schedule.groups * rounds - len(found))
            places = range(first + len(found), first + len(found) + count)
            found += await asyncio.gather(*map(self._play, places))
            if not schedule.skip_flat:
                break
            wanted = schedule.groups - sum(not one.made.is_flat for one in found)
        return found

    async def _play(self, place: int) -> Played:
        group = self.problems.group(self._index(place))
        size = self.schedule.group_size
        seeds = [seed_of(self.schedule.seed, place, attempt) for attempt in range(size)]
        trajectories = await play_group(group, self.sampler, self.limits, seeds)
        made = self.algorithm.made(trajectories)
        return Played(name=group.name, trajectories=trajectories, made=made)

    def _index(self, place: int) -> int:
        """Of a set with an end every problem comes once before one comes again, in another order
        each time."""
        size = self.problems.size
        if size is None:
            return place
        return _order(size, self.schedule.seed, place // size)[place % size]

    def _sampling_metrics(self, played: Sequence[Played]) -> Line:
        everyone = [one for group in played for one in group.trajectories]
        rewards = [one.reward for one in everyone if one.reward is not None]
        lengths = [one.num_answer_tokens for one in everyone]
        versions = [v for one in everyone for v in versions_of(one)]
        line: Line = {
            "sample/reward": sum(rewards) / len(rewards) if rewards else None,
            "answers/count": len(everyone),
            "answers/tokens:mean": sum(lengths) / max(len(lengths), 1),
            "answers/empty": lengths.count(0),
            "answers/without_reward": len(everyone) - len(rewards),
            "groups/count": len(played),
            "groups/flat": sum(group.made.is_flat for group in played),
            "answers/masked": sum(group.made.num_masked for group in played),
        }
        for status in ("truncated", "failed", "timed_out"):
            line[f"answers/{status}"] = sum(one.status == status for one in everyone)
        if versions:
            line["lag/tokens:max"] = self.sampler.version - min(versions)
            line["lag/tokens:mean"] = self.sampler.version - sum(versions) / len(versions)
        return line

    # Learning

    def _learn(self, step: int, played: Sequence[Played]) -> Line:
        samples = [sample for group in played for sample in group.made.samples]
        agreement, line = Agreement(), Line()
        silent = [
            sample
            for group in played
            if not group.made.samples
            for trajectory in group.trajectories
            for sample in samples_of(trajectory, 0.0)
        ]
        if silent:  # nothing is learned from them; that both see the same is checked all the same
            agreement.add(silent, self._forward(silent).logprobs)
        parts = _parts(samples, self.schedule.minibatches)
        has_own_pass = len(parts) > 1 or self.correction.kind != "none"
        if has_own_pass:
            logprobs = self._forward(samples).logprobs
            agreement.add(samples, logprobs)
            samples, more = self.correction.corrected(samples, logprobs)
            line |= more
            parts = _parts(samples, self.schedule.minibatches)
        for part in parts:
            output, norm = self._optimize(step, part)
            if not has_own_pass:  # then the only step's own forward came before it
                agreement.add(part, output.logprobs)
            line |= {f"train/{name}": value for name, value in output.metrics.items()}
            line["train/loss"] = output.loss_sum / (output.weight_sum or 1.0)
            line["optim/grad_norm"] = norm
        line["train/samples"] = len(samples)
        line["train/tokens"] = sum(sample.num_tokens for sample in samples)
        return line | agreement.metrics()

    def _optimize(self, step: int, samples: Sequence[Sample]) -> tuple[ForwardOutput, float]:
        params = self._params(step)
        if self.algorithm.divisor == "answers":
            count = len(samples)
            samples = [_scaled(sample, 1 / count) for sample in samples]
            params = dataclasses.replace(params, normalise=False)
        settings = {**self.algorithm.loss_settings, **self._distribution}
        output = self.trainer.forward_backward(samples, self.algorithm.loss, settings)
        return output, self.trainer.optim_step(params)["grad_norm"]

    def _forward(self, samples: Sequence[Sample]) -> ForwardOutput:
        return self.trainer.forward(samples, "importance_sampling", self._distribution)

    @property
    def _distribution(self) -> dict[str, float]:
        """What the trainer's log-probs are of: that from which the sampler drew."""
        return {"temperature": self.limits.temperature}


@functools.lru_cache(maxsize=2)  # a step's problems may lie in two times through
def _order(size: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(seed_of(seed, epoch, -1)).shuffle(order)
    return order


def seed_of(*parts: int) -> int:
    """A number of 63 bits that these numbers lead to, on every machine."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _parts(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Up to `count` runs of samples, as even as can be; none of nothing."""
    count = min(count, len(samples))
    ends = [len(samples) * (i + 1) // count for i in range(count)]
    return [list(samples[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _scaled(sample: Sample, factor: float) -> Sample:
    weights = sample.inputs["weights"] * factor
    return dataclasses.replace(sample, inputs={**sample.inputs, "weights": weights})
