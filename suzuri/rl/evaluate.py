"""How good the model is on problems that it does not practise. No torch here."""

# pyright: strict

import asyncio
import dataclasses
import statistics
from collections import defaultdict
from typing import Any

from suzuri.envs.env import Problems, Trajectory
from suzuri.envs.rollout import Limits, play_group
from suzuri.rl.config import EvaluationConfig
from suzuri.rl.drawing import seed_of
from suzuri.types import Sampler

EVALUATION = -2
"""Keeps the random numbers of evaluation apart from those of training."""


async def evaluate(
    problems: Problems, sampler: Sampler, limits: Limits, config: EvaluationConfig
) -> dict[str, Any]:
    """Metrics: the mean score over problems, its standard error, shares of attempts that were
    truncated or have no reward, which count as 0; the mean by kind of problem."""
    limits = dataclasses.replace(limits, temperature=config.temperature, routing=False)
    size = min(config.size, problems.size or config.size)

    async def play(index: int) -> tuple[str, list[Trajectory]]:
        group = problems.group(index)
        seeds = [seed_of(EVALUATION, index, attempt) for attempt in range(config.samples)]
        return group.name, await play_group(group, sampler, limits, seeds)

    played = await asyncio.gather(*map(play, range(size)))
    scores, by_name = list[float](), defaultdict[str, list[float]](list)
    for name, trajectories in played:
        score = statistics.fmean(one.reward or 0.0 for one in trajectories)
        scores.append(score)
        by_name[name].append(score)
    everyone = [one for _, trajectories in played for one in trajectories]
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    found: dict[str, Any] = {
        "eval/reward": statistics.fmean(scores),
        "eval/standard_error": error,
        "eval/truncated": sum(one.status == "truncated" for one in everyone) / len(everyone),
        "eval/without_reward": sum(one.reward is None for one in everyone) / len(everyone),
        "eval/problems": size,
    }
    if len(by_name) > 1:
        found |= {
            f"eval/reward/{name}": statistics.fmean(by_name[name]) for name in sorted(by_name)
        }
    return found
