"""Playing an environment to its end. Tokens go in and out: no answer is spelled and read again.

No torch here.
"""

# pyright: strict

import asyncio
import dataclasses
import math
from collections.abc import Sequence

from suzuri.envs.env import Env, EnvGroup, Trajectory, Turn
from suzuri.envs.guard import Fault, guarded
from suzuri.types import SampleParams, Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one attempt. Raises ValueError naming the field."""

    max_tokens: int = 256
    """Tokens of one answer."""

    max_turns: int = 8
    """Answers."""

    max_context: int = 4096
    """Tokens of prompt and answer together."""

    env_seconds: float = 30.0
    """What the environment may take for one answer, before the attempt counts as timed out."""

    temperature: float = 1.0
    """0: the most likely answer, for evaluation."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_turns", "max_context"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        if not 0 < self.env_seconds < math.inf:
            raise ValueError(f"env_seconds = {self.env_seconds!r}: must be a number above 0")
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature = {self.temperature!r}: must be from 0 to 100")


async def rollout(env: Env, sampler: Sampler, limits: Limits, seed: int) -> Trajectory:
    """Plays `env`. Raises nothing but cancellation: what goes wrong is in the trajectory's status.

    `seed` and the number of the turn decide what is drawn.
    """
    turns: list[Turn] = []
    total: float | None = 0.0
    metrics: dict[str, float] = {}

    def ended(status: str, error: str | None = None) -> Trajectory:
        reward = None if status in ("failed", "timed_out") else total
        return Trajectory(
            turns=turns, reward=reward, status=status, error=error, metrics=dict(metrics)
        )

    try:
        prompt = await guarded(env.initial(), limits.env_seconds)
        while True:
            room = limits.max_context - len(prompt.tokens)
            if room < 1 or len(turns) == limits.max_turns:
                return ended("truncated")
            params = SampleParams(
                max_tokens=min(limits.max_tokens, room),
                temperature=limits.temperature,
                seed=seed + len(turns),
            )
            answer = await guarded(sampler.sample(prompt, params), None)
            turns.append(Turn(prompt=prompt, answer=answer))
            if answer.finish == "error":
                return ended("failed", answer.error)
            outcome = await guarded(env.step(answer), limits.env_seconds)
            total = _added(total, outcome.reward)
            metrics |= outcome.metrics
            if outcome.prompt is None:
                return ended("over" if answer.finish == "stop" else "truncated")
            prompt = outcome.prompt
    except Fault as fault:
        who = "the environment " if fault.status == "timed_out" else ""
        return ended(fault.status, f"{who}{fault}")


async def play_group(
    group: EnvGroup, sampler: Sampler, limits: Limits, seeds: Sequence[int]
) -> list[Trajectory]:
    """An attempt per seed, all at the same time, with the rewards that the group adds."""
    envs = group.envs(len(seeds))
    if len(envs) != len(seeds):
        raise ValueError(f"{group.name}: made {len(envs)} environments, asked for {len(seeds)}")
    found = await asyncio.gather(
        *(rollout(env, sampler, limits, seed) for env, seed in zip(envs, seeds, strict=True))
    )
    try:
        extra = await guarded(group.rewards(found), limits.env_seconds)
        if len(extra) != len(found):
            raise Fault("failed", f"{len(extra)} rewards for {len(found)} attempts")
    except Fault as fault:
        error = f"rewards of the group: {fault}"
        return [
            dataclasses.replace(one, reward=None, status=fault.status, error=error) for one in found
        ]
    return [
        dataclasses.replace(trajectory, reward=_added(trajectory.reward, more))
        for trajectory, more in zip(found, extra, strict=True)
    ]


def _added(total: float | None, more: float | None) -> float | None:
    if total is None or more is None:
        return None
    value = total + float(more)
    return value if math.isfinite(value) else None
