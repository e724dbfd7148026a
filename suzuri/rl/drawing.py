"""Where the batch of a step comes from: drawn, or read from files. Read `Drawing.batch`.

No torch here.
"""

# pyright: strict

import asyncio
import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from suzuri.envs.env import Problems
from suzuri.envs.rollout import play_group
from suzuri.rl.algorithms.group import Algorithm, Made
from suzuri.rl.config import RlConfig
from suzuri.rl.rollouts import Attempted, Rollouts, load_rollouts
from suzuri.rl.scores import Scorer, with_scores
from suzuri.types import Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played(Attempted):
    """And what the algorithm made of it."""

    made: Made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """`version`: of the weights that drew last when it was first learned from; None: now.
    `score_seconds`: what other models took to say what they find."""

    played: Sequence[Played]
    version: int | None = None
    score_seconds: float = 0.0


class Source(Protocol):
    """Batches by the number of their step."""

    async def batch(self, step: int) -> Batch: ...


class Drawing:
    """Problems, whose attempts a sampler draws and `scorers`, by name, look at. `config.limits` are
    those that the models allow."""

    def __init__(
        self,
        config: RlConfig,
        problems: Problems,
        sampler: Sampler,
        scorers: Mapping[str, Scorer] | None = None,
    ) -> None:
        self.problems, self.sampler = problems, sampler
        self._config, self._scorers = config, scorers or {}

    async def batch(self, step: int) -> Batch:
        """Which problems, and what is drawn, depends on the step's number and the weights alone."""
        config = self._config
        rounds = config.most_rounds if config.skip_flat else 1
        most = config.groups * rounds
        first, found, seconds = (step - 1) * most, list[Played](), 0.0
        wanted = config.groups
        while wanted > 0 and len(found) < most:
            count = min(wanted, most - len(found))
            places = range(first + len(found), first + len(found) + count)
            groups = await asyncio.gather(*map(self._attempted, places))
            if self._scorers:
                begin = time.perf_counter()
                groups = await self._scored(groups)
                seconds += time.perf_counter() - begin
            found += [played(group, config.algorithm) for group in groups]
            if not config.skip_flat:
                break
            wanted = config.groups - sum(not one.made.is_flat for one in found)
        return Batch(played=found, score_seconds=seconds)

    async def _attempted(self, place: int) -> Attempted:
        group = self.problems.group(self._index(place))
        seeds = [
            seed_of(self._config.seed, place, attempt) for attempt in range(self._config.group_size)
        ]
        trajectories = await play_group(group, self.sampler, self._config.limits, seeds)
        return Attempted(place=place, name=group.name, trajectories=trajectories)

    async def _scored(self, groups: Sequence[Attempted]) -> list[Attempted]:
        everyone = [one for group in groups for one in group.trajectories]
        rest = iter(await with_scores(everyone, self._scorers))
        return [
            dataclasses.replace(group, trajectories=[next(rest) for _ in group.trajectories])
            for group in groups
        ]

    def _index(self, place: int) -> int:
        """Of a set with an end every problem comes once before one comes again, in another order
        each time."""
        size = self.problems.size
        if size is None:
            return place
        return _order(size, self._config.seed, place // size)[place % size]


class Recorded:
    """Batches that were saved."""

    def __init__(self, folder: Path, algorithm: Algorithm) -> None:
        self._folder, self._algorithm = folder, algorithm

    async def batch(self, step: int) -> Batch:
        """Raises ValueError naming a file that is not there."""
        found = await asyncio.to_thread(load_rollouts, self._folder, step)
        groups = [played(group, self._algorithm) for group in found.groups]
        return Batch(played=groups, version=found.version)


def played(group: Attempted, algorithm: Algorithm) -> Played:
    """What an algorithm makes of a group."""
    return Played(**vars(group), made=algorithm.made(group.trajectories))


def rollouts_of(step: int, version: int, groups: Sequence[Played]) -> Rollouts:
    """The batch as it is saved."""
    return Rollouts(
        step=step,
        version=version,
        groups=[
            Attempted(place=one.place, name=one.name, trajectories=one.trajectories)
            for one in groups
        ],
    )


@functools.lru_cache(maxsize=2)  # a step's problems may lie in two times through
def _order(size: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(seed_of(seed, epoch, -1)).shuffle(order)
    return order


def seed_of(*parts: int) -> int:
    """A number of 63 bits that these numbers lead to, on every machine."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
