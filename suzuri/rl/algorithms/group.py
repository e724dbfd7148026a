"""What an algorithm is: the attempts at one problem in, samples for the trainer out.

No torch here. Rules that all of them share, so that no reward spoils another's:

- An attempt without a reward (failed, timed out, NaN) is left out: no baseline counts it.
- An attempt without tokens has nothing to learn from, but its reward counts in the baseline.
- A group of fewer than two rewards, or of equal ones, says nothing: it is flat, its advantages are
  0, and it brings no samples unless `keep_flat` asks for them (for terms that need no advantage).
- A truncated attempt is one like others, with the reward that its environment gave, unless
  `mask_truncated` takes its tokens out of the loss (Yu et al., "DAPO", 2025: overlong filtering).
"""

# pyright: strict

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from suzuri.envs.env import Trajectory
from suzuri.rl.samples import Weighting, samples_of
from suzuri.types import Sample

Advantages = Callable[[Sequence[float]], Sequence[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a group became. `is_flat`: it says nothing; `num_without_reward` attempts were left
    out, `num_empty` had no tokens, `num_masked` were truncated and taken out of the loss."""

    samples: Sequence[Sample]
    is_flat: bool = False
    num_without_reward: int = 0
    num_empty: int = 0
    num_masked: int = 0


class Algorithm(Protocol):
    """Which loss it trains with, and how samples are made."""

    @property
    def loss(self) -> str:
        """A name of training/losses.py."""
        ...

    @property
    def loss_settings(self) -> Mapping[str, float | str]: ...

    @property
    def divisor(self) -> Literal["weights", "answers"]:
        """What the sum of the loss is divided by: the weights of the batch, or its answers."""
        ...

    def made(self, group: Sequence[Trajectory]) -> Made: ...


def make_samples(
    group: Sequence[Trajectory],
    advantages: Advantages,
    *,
    weighting: Weighting = "tokens",
    keep_flat: bool = False,
    mask_truncated: bool = False,
    longest: int = 1,
) -> Made:
    """Samples whose tokens all have their attempt's advantage: `advantages` of the rewards that
    there are. `longest`: tokens by which weighting "constant" divides."""
    judged = [one for one in group if one.reward is not None]
    rewards = [one.reward for one in judged if one.reward is not None]
    counts = {
        "num_without_reward": len(group) - len(judged),
        "num_empty": sum(one.num_answer_tokens == 0 for one in judged),
    }
    is_flat = len(rewards) < 2 or max(rewards) == min(rewards)
    if is_flat and not keep_flat:
        return Made(samples=(), is_flat=True, **counts)
    found = [0.0] * len(rewards) if is_flat else advantages(rewards)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"advantages {list(found)} of rewards {rewards} are no numbers")
    samples: list[Sample] = []
    num_masked = 0
    for trajectory, advantage in zip(judged, found, strict=True):
        if not trajectory.num_answer_tokens:
            continue
        if mask_truncated and trajectory.status == "truncated":
            num_masked += 1
            continue
        samples += samples_of(trajectory, advantage, weighting=weighting, longest=longest)
    return Made(samples=samples, is_flat=is_flat, num_masked=num_masked, **counts)
