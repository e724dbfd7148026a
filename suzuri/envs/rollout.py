"""Playing an environment to its end. Tokens go in and out: no answer is spelled and read again.

Every attempt's environment has a thread of its own (guard.py). No torch here.
"""

# pyright: strict

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Sequence

from suzuri.envs.env import Env, EnvGroup, Outcome, Trajectory, Turn
from suzuri.envs.guard import Fault, Result, Stage, guarded
from suzuri.types import Answer, Prompt, SampleParams, Sampler

MAX_REWARD = 1e30
"""A reward beyond it, either way, is none: advantages are fp32."""


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
    """What the environment may take for one answer, before the attempt counts as timed out. Longer
    it holds up nothing, whatever it does."""

    temperature: float = 1.0
    """0: the most likely answer, for evaluation."""

    routing: bool = False
    """Answers say which experts their tokens went to, and a trainer lets them go there again: for
    data of older weights, whose router may have chosen otherwise."""

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
    """Plays `env`. What goes wrong is in the trajectory's status; only SamplerLost is raised.

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

    seconds, stage = limits.env_seconds, None
    try:
        stage = await Stage.opened(seconds)
        prompt = await stage.run(functools.partial(_first, env), seconds)
        while True:
            room = limits.max_context - len(prompt.tokens)
            if room < 1 or len(turns) == limits.max_turns:
                return ended("truncated")
            params = SampleParams(
                max_tokens=min(limits.max_tokens, room),
                temperature=limits.temperature,
                seed=seed + len(turns),
                routing=limits.routing,
            )
            answer = await guarded(sampler.sample(prompt, params), None)
            turns.append(Turn(prompt=prompt, answer=answer))
            if answer.finish == "error":
                return ended("failed", answer.error)
            outcome = await stage.run(functools.partial(_next, env, answer), seconds)
            total = _added(total, outcome.reward)
            metrics |= outcome.metrics
            if outcome.prompt is None:
                return ended("over" if answer.finish == "stop" else "truncated")
            prompt = outcome.prompt
    except Fault as fault:
        who = "the environment " if fault.status == "timed_out" else ""
        return ended(fault.status, f"{who}{fault}")
    finally:
        if stage is not None:
            stage.close()


async def play_group(
    group: EnvGroup, sampler: Sampler, limits: Limits, seeds: Sequence[int]
) -> list[Trajectory]:
    """An attempt per seed, all at the same time, with the rewards that the group adds. Raises
    ValueError for a group that makes another number of environments."""

    async def make() -> Sequence[Env]:
        return list(group.envs(len(seeds)))

    async def judge() -> list[float | None]:
        return [_number(reward) for reward in await group.rewards(found)]

    try:
        envs = await _on_stage(make, limits.env_seconds)
    except Fault as fault:
        error = f"environments of the group: {fault}"
        lost = Trajectory(turns=(), reward=None, status=fault.status, error=error)
        return [lost] * len(seeds)
    if len(envs) != len(seeds):
        raise ValueError(f"{group.name}: made {len(envs)} environments, asked for {len(seeds)}")
    found = await asyncio.gather(
        *(rollout(env, sampler, limits, seed) for env, seed in zip(envs, seeds, strict=True))
    )
    try:
        extra = await _on_stage(judge, limits.env_seconds)
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


async def _on_stage(call: Callable[[], Awaitable[Result]], seconds: float) -> Result:
    stage = await Stage.opened(seconds)
    try:
        return await stage.run(call, seconds)
    finally:
        stage.close()


async def _first(env: Env) -> Prompt:
    return _is_a(Prompt, await env.initial())


async def _next(env: Env, answer: Answer) -> Outcome:
    """What the environment said, with a reward that is a number or None."""
    outcome = _is_a(Outcome, await env.step(answer))
    if outcome.prompt is not None:
        _is_a(Prompt, outcome.prompt)
    metrics = dict(outcome.metrics)
    return dataclasses.replace(outcome, reward=_number(outcome.reward), metrics=metrics)


def _is_a(kind: type[Result], found: object) -> Result:
    if not isinstance(found, kind):
        raise TypeError(f"gave {type(found).__name__}, not {kind.__name__}")
    return found


def _number(reward: float | None) -> float | None:
    return None if reward is None else float(reward)


def _added(total: float | None, more: float | None) -> float | None:
    if total is None or more is None:
        return None
    value = total + more
    return value if abs(value) <= MAX_REWARD else None
