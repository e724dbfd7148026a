"""Attempts made by hand."""

from collections.abc import Sequence
from typing import Any

from suzuri.envs.env import Trajectory, Turn
from suzuri.types import Answer, Prompt


def turn(
    prompt: Sequence[int], answer: Sequence[int], *, logprob: float = -0.5, finish: str = "stop"
) -> Turn:
    """An answer whose k-th token has the log-prob `logprob` - k."""
    logprobs = [logprob - k for k in range(len(answer))]
    drawn = Answer(tokens=answer, logprobs=logprobs, versions=[0] * len(answer), finish=finish)
    return Turn(prompt=Prompt(tokens=prompt), answer=drawn)


def attempt(reward: float | None, *turns: Turn, **fields: Any) -> Trajectory:
    fields = {"status": "over"} | fields
    return Trajectory(turns=turns or (turn([1, 2], [3, 4]),), reward=reward, **fields)
