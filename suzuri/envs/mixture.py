"""An endless stream of tasks: place i is always the same task, and can be made without the others.

So a run resumes from a number, several workers share a stream by taking places apart, and the
held-out stream has nothing of the training stream in it (task.py: the split of a key).
"""

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Annotated

from suzuri.envs.generators.kinds import KINDS, VARIANTS
from suzuri.envs.task import Split, Task, draw
from suzuri.types import Conversation

NANO_WEIGHTS: dict[str, float] = {
    "arithmetic": 22.0,
    "strings": 14.0,
    "stories": 12.0,
    "tools": 14.0,
    "json": 7.0,
    "small_talk": 9.0,
    "knowledge": 5.0,
    "conversations": 6.0,
    "pictures": 9.0,
    "sounds": 6.0,
}
"""What inkling-nano learns from, in tasks. Leave out kinds for a model without towers."""
TEXT_WEIGHTS = {k: w for k, w in NANO_WEIGHTS.items() if k not in ("pictures", "sounds")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Which tasks, how often, how hard. Raises ValueError naming the field.

    Difficulties are drawn evenly from a range that moves from `start` to `end` over the first
    `ramp` places and then stays.
    """

    weights: Annotated[Mapping[str, float], "by kind, or kind/variant"] = dataclasses.field(
        default_factory=lambda: dict(NANO_WEIGHTS)
    )
    seed: int = 0
    split: Split = "train"
    start: Annotated[tuple[float, float], "least and greatest difficulty at place 0"] = (0.0, 1.0)
    end: tuple[float, float] = (0.0, 1.0)
    ramp: Annotated[int, "places until `end` is reached"] = 0

    def __post_init__(self) -> None:
        if self.split not in ("train", "held_out"):
            raise ValueError(f"split = {self.split!r}: must be train or held_out")
        if not any(weight > 0 for weight in self.weights.values()):
            raise ValueError("weights: at least one must be above 0")
        for name, weight in self.weights.items():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"weights[{name!r}] = {weight}: must be 0 or more")
            _check_name(name)
        for field in ("start", "end"):
            low, high = getattr(self, field)
            if not 0 <= low <= high <= 1:
                raise ValueError(f"{field} = ({low}, {high}): must be two rising numbers in 0..1")
        if self.ramp < 0:
            raise ValueError(f"ramp = {self.ramp}: must be 0 or more")

    @classmethod
    def of(
        cls, name: str, difficulties: tuple[float, float], *, seed: int, split: Split
    ) -> "Mixture":
        """Tasks of one kind or kind/variant, in one range of difficulties throughout."""
        return cls(
            weights={name: 1.0}, seed=seed, split=split, start=difficulties, end=difficulties
        )

    def task(self, position: int) -> Task:
        """The task at a place from 0 on."""
        if position < 0:
            raise ValueError(f"position = {position}: must be 0 or more")
        rng = random.Random(place_seed(self.seed, self.split, position))
        names = [name for name, weight in self.weights.items() if weight > 0]
        weights = [self.weights[name] for name in names]
        kind, _, variant = rng.choices(names, weights)[0].partition("/")
        low, high = self.difficulties(position)
        difficulty = rng.uniform(low, high)
        if variant:
            difficulty = max(difficulty, VARIANTS[kind][variant])
        return draw(KINDS[kind], rng, difficulty, self.split, variant or None)

    @property
    def size(self) -> int | None:
        """Without end."""
        return None

    def conversation(self, index: int) -> Conversation:
        """The task at a place as something to learn from (a `Dataset`, types.py): only its target
        counts, for the turns before it have lost their thoughts."""
        task = self.task(index)
        known = [
            {**message, "weight": 0} if message["role"] == "assistant" else message
            for message in task.messages
        ]
        messages = (*known, *task.target)
        return Conversation(messages=messages, tools=task.tools, effort=task.effort)

    def tasks(self, position: int = 0) -> Iterator[Task]:
        """All from a place on, without end."""
        return map(self.task, itertools.count(position))

    def difficulties(self, position: int) -> tuple[float, float]:
        """The range at a place."""
        way = 1.0 if position >= self.ramp else position / self.ramp
        low, high = (a + (b - a) * way for a, b in zip(self.start, self.end, strict=True))
        return low, high


def _check_name(name: str) -> None:
    kind, _, variant = name.partition("/")
    if kind not in KINDS:
        raise ValueError(f"weights: no kind {kind!r}; there are {', '.join(KINDS)}")
    if variant and variant not in VARIANTS[kind]:
        raise ValueError(f"weights: {kind} has no {variant!r}; it has {', '.join(VARIANTS[kind])}")


def place_seed(seed: int, split: str, position: int) -> int:
    """What is drawn at a place, on every machine."""
    text = f"{seed}:{split}:{position}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
