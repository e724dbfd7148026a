"""Problems of reasoning-gym: families of generated questions, each with a scorer of its own.

`Gym` says which, `GymProblems` makes them; gym_worker.py talks to the library, in a process of its
own. No torch here.
"""

# pyright: strict

import asyncio
import concurrent.futures
import dataclasses
import importlib.util
import json
import math
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Env, Outcome, Trajectory
from suzuri.envs.mixture import place_seed
from suzuri.envs.task import Message, Split
from suzuri.envs.verifiable import EXTRACTS, MAX_TEXT, extracted
from suzuri.envs.workers import CallLimits, WorkerError, Workers
from suzuri.processing.chat import effort_level
from suzuri.types import Answer, Prompt

PACKAGE = "reasoning_gym"
ITEM_LIMITS = CallLimits(cpu_seconds=20.0, wall_seconds=28.0)
SCORE_LIMITS = CallLimits(cpu_seconds=5.0, wall_seconds=25.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gym:
    """Which families, how often, and with which settings of their own. Raises ValueError naming the
    field.

    `split`: one question in ten is held out, whatever the seed: the two sides have none in common.
    `extract`: where in the answer it stands, as in files of prompts. `system`: what the model is
    told first, for instance where to write the answer. `partial`: whether a score below 1 counts;
    many families give some for an answer that merely contains the right one.
    """

    families: str | Mapping[str, float]
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, Any]]
    )
    seed: int = 0
    split: Split = "train"
    extract: str = "all"
    system: str = ""
    effort: float | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.split not in ("train", "held_out"):
            raise ValueError(f"split = {self.split!r}: must be train or held_out")
        if self.extract not in EXTRACTS:
            raise ValueError(f"extract = {self.extract!r}: there are {', '.join(EXTRACTS)}")
        for name, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"families[{name!r}] = {weight}: must be 0 or more")
        if not any(self.weights.values()):
            raise ValueError("families: at least one must have a weight above 0")
        if unknown := sorted(set(self.settings) - set(self.weights)):
            raise ValueError(f"settings: {', '.join(unknown)} is none of the families")
        try:
            json.dumps(dict(self.settings))
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: must be values of JSON ({error})") from error
        if self.effort is not None:
            effort_level(self.effort)

    @property
    def weights(self) -> Mapping[str, float]:
        return {self.families: 1.0} if isinstance(self.families, str) else self.families


class GymProblems:
    """Without end; the same number, the same problem in every process. ValueError for families and
    settings that there are not, and where the package is missing."""

    size: int | None = None

    def __init__(self, gym: Gym, prompts: ChatPrompts) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ValueError(f"{PACKAGE} is not installed: pip install 'suzuri[gym]'")
        self._gym, self._prompts = gym, prompts
        self._workers = Workers(["suzuri.envs.gym_worker", PACKAGE])
        families = {name: dict(gym.settings.get(name, {})) for name in gym.weights}
        limits = CallLimits(cpu_seconds=None, wall_seconds=120.0)
        fault = self._workers.call_now("suzuri.envs.gym_worker:check", families, limits=limits)
        if fault is not None:
            raise ValueError(fault)

    def group(self, index: int) -> "GymGroup":
        gym = self._gym
        names = [name for name, weight in gym.weights.items() if weight > 0]
        rng = random.Random(place_seed(gym.seed, gym.split, index))
        family = rng.choices(names, [gym.weights[name] for name in names])[0]
        return GymGroup(gym, self._prompts, self._workers, family, rng.randrange(2**31))


class GymGroup:
    """Attempts at one item, which is made when the first begins."""

    def __init__(
        self, gym: Gym, prompts: ChatPrompts, workers: Workers, family: str, seed: int
    ) -> None:
        self.gym, self.prompts = gym, prompts
        self.name = f"gym/{family}"
        self._workers = workers
        self._call = (family, json.dumps(dict(gym.settings.get(family, {}))), seed)
        self._item: concurrent.futures.Future[dict[str, Any]] | None = None
        self._lock = threading.Lock()  # attempts run in threads of their own

    def envs(self, count: int) -> Sequence[Env]:
        return [GymEnv(self) for _ in range(count)]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0] * len(trajectories)

    async def item(self) -> dict[str, Any]:
        """Raises what making it raises, for every attempt."""
        with self._lock:
            if self._item is None:
                call = ("suzuri.envs.gym_worker:item", *self._call, self.gym.split)
                self._item = self._workers.begin(*call, limits=ITEM_LIMITS)
        # One attempt that is broken off does not take it from the others.
        return await asyncio.shield(asyncio.wrap_future(self._item))

    async def score(self, text: str) -> tuple[float, bool]:
        """(from 0 to 1, whether the scorer could say). It scores 0 where it raises, hangs, or says
        what is no score: the item's own answer it took, so it is the text's fault."""
        index = (await self.item())["index"]
        call = ("suzuri.envs.gym_worker:score", *self._call, index, text)
        try:
            found = await self._workers.call(*call, limits=SCORE_LIMITS)
        except (TimeoutError, WorkerError):
            return 0.0, False
        return (found if self.gym.partial or found == 1.0 else 0.0), True


class GymEnv:
    """One attempt: one answer."""

    def __init__(self, group: GymGroup) -> None:
        self._group = group

    async def initial(self) -> Prompt:
        gym = self._group.gym
        question: Message = {"role": "user", "content": (await self._group.item())["question"]}
        first: list[Message] = [{"role": "system", "content": gym.system}] if gym.system else []
        return self._group.prompts.first([*first, question], (), gym.effort)

    async def step(self, answer: Answer) -> Outcome:
        said: object = None
        if answer.finish == "stop":
            said = self._group.prompts.message(answer, tools=False)["content"]
        text = None
        if isinstance(said, str) and len(said) <= MAX_TEXT:
            text = extracted(said, self._group.gym.extract)
        if text is None:
            return Outcome(reward=0.0)
        score, is_scored = await self._group.score(text.strip())
        return Outcome(reward=score, metrics={"gym/unscored": float(not is_scored)})
