"""What an environment is: it shows a prompt, takes the model's answer, says what that was worth.

No torch here. Read next: rollout.py, which plays one; task_env.py, an environment of a `Task`.
"""

# pyright: strict

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from suzuri.types import Answer, Array, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an answer led to. `prompt`: what the model is to go on from; None: it is over. In a
    conversation it begins with the prompt before and the answer, id by id, so that all of it is one
    sample to train on. `reward` is added to those of earlier answers; None: no reward could be
    found. `metrics` by name, of which the last value counts."""

    reward: float | None = 0.0
    prompt: Prompt | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


class Env(Protocol):
    """One attempt at one problem; used once. What it raises ends this attempt alone."""

    async def initial(self) -> Prompt: ...

    async def step(self, answer: Answer) -> Outcome: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """`scores`: what other models say of the answer's tokens, by who says it, [T] each: log-probs
    of a "teacher" or a "reference", values of a critic."""

    prompt: Prompt
    answer: Answer
    scores: Mapping[str, Array] = dataclasses.field(default_factory=dict[str, Array])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """An attempt that was played. `status`: "over" (by the environment's own rules), "truncated"
    (an answer or the conversation became too long), "timed_out", "failed" (`error` says why).

    `reward`: None where the environment gave none, or a number that is none (NaN, or
    beyond 1e30).
    """

    turns: Sequence[Turn]
    reward: float | None
    status: str
    error: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(turn.answer.tokens) for turn in self.turns)

    @property
    def is_whole(self) -> bool:
        """Whether the environment saw its end, or the model talked too long: what a reward tells
        something about."""
        return self.status in ("over", "truncated")


class EnvGroup(Protocol):
    """The attempts at one problem that are compared with each other."""

    @property
    def name(self) -> str:
        """Of the kind of problem, for metrics."""
        ...

    def envs(self, count: int) -> Sequence[Env]:
        """So many fresh ones."""
        ...

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """What is added to the reward of each, for environments that judge attempts together."""
        ...


class Problems(Protocol):
    """Problems by number. The same number gives the same problem in every process."""

    @property
    def size(self) -> int | None:
        """How many there are; None: without end."""
        ...

    def group(self, index: int) -> EnvGroup: ...
