"""What an algorithm is: the attempts at one problem in, samples for the trainer out.

No torch here. Rules that all of them share, so that no reward spoils another's:

- An attempt without a reward (failed, timed out, NaN, huge) is left out: no baseline counts it.
- An attempt without tokens has nothing to learn from, but its reward counts in the baseline.
- A group of fewer than two rewards, or of equal ones, says nothing: it is flat, its advantages are
  0, and it brings no samples unless `keep_flat` asks for them (for terms that need no advantage).
- A truncated attempt is one like others, with the reward that its environment gave, unless
  `mask_truncated` takes its tokens out of the loss (Yu et al., "DAPO", 2025: overlong filtering).
- An attempt to which a model that is needed gave no scores is left out as well.
"""

# pyright: strict

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.samples import Weighting, samples_of
from suzuri.types import Sample

Advantages = Callable[[Sequence[float]], Sequence[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a group became. `is_flat`: it says nothing; `num_without_reward` attempts were left
    out, `num_unscored` for want of scores; `num_empty` had no tokens, `num_masked` were truncated
    and taken out of the loss. `penalty`: the sum of what `num_overlong` attempts lost for length.

    `silent`: attempts of which no sample says with what log-probs they were drawn; sampler and
    trainer are compared on them all the same. A group without samples is silent as a whole.
    """

    samples: Sequence[Sample]
    is_flat: bool = False
    num_without_reward: int = 0
    num_unscored: int = 0
    num_empty: int = 0
    num_masked: int = 0
    num_overlong: int = 0
    penalty: float = 0.0
    silent: Sequence[Trajectory] = ()


class Algorithm(Protocol):
    """Which loss it trains with, and how samples are made. The loop knows nothing else of it:

    - An algorithm over pairs, such as DPO, sees all attempts at a problem in `made`. The gradient
      of any function of log-probs is that of a weighted sum of them: at lag 0 its weights follow
      from the log-probs with which the attempts were drawn (and "reference" scores), with loss
      "cross_entropy", and divisor "answers", for they may sum to 0 (tests/rl/test_pairs.py).
    - PPO's critic is one more model that scores (`needs`), before `made`; what it learns from a
      batch it is told by a `Watcher` of the loop. REINFORCE++ needs rewards of the whole batch:
      an algorithm that keeps running moments of them between its calls.
    """

    @property
    def needs(self) -> Collection[str]:
        """Which scores of `Turn` it looks at."""
        ...

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
    overlong: OverlongPenalty | None = None,
    with_reference: bool = False,
) -> Made:
    """Samples whose tokens all have their attempt's advantage: `advantages` of the rewards that
    there are. `longest`: tokens by which weighting "constant" divides. `with_reference`: they say
    what the "reference" gives their tokens."""
    judged = [one for one in group if one.reward is not None]
    scored = [one for one in judged if not with_reference or is_scored(one, "reference")]
    penalties = [overlong(one.num_answer_tokens) if overlong else 0.0 for one in scored]
    found = [one.reward for one in scored if one.reward is not None]
    rewards = [reward + penalty for reward, penalty in zip(found, penalties, strict=True)]
    made = Made(
        samples=(),
        is_flat=len(rewards) < 2 or max(rewards) == min(rewards),
        num_without_reward=len(group) - len(judged),
        num_unscored=len(judged) - len(scored),
        num_empty=sum(one.num_answer_tokens == 0 for one in scored),
        num_overlong=sum(penalty != 0 for penalty in penalties),
        penalty=math.fsum(penalties),
    )
    if made.is_flat and not keep_flat:
        return made
    factors = [0.0] * len(rewards) if made.is_flat else advantages(rewards)
    if not all(map(math.isfinite, factors)):
        raise ValueError(f"advantages {list(factors)} of rewards {rewards} are no numbers")
    is_masked = [mask_truncated and one.status == "truncated" for one in scored]
    samples: list[Sample] = []
    for trajectory, factor, masked in zip(scored, factors, is_masked, strict=True):
        if masked or not trajectory.num_answer_tokens:
            continue
        own = samples_of(trajectory, factor, weighting=weighting, longest=longest)
        samples += _with_reference(own, trajectory) if with_reference else own
    left = {id(one) for one, masked in zip(scored, is_masked, strict=True) if not masked}
    return dataclasses.replace(
        made,
        samples=samples,
        num_masked=sum(
            masked and one.num_answer_tokens > 0
            for one, masked in zip(scored, is_masked, strict=True)
        ),
        silent=[one for one in group if id(one) not in left],
    )


def is_scored(trajectory: Trajectory, who: str) -> bool:
    """Whether all its answers have these scores, each a number."""
    return all(
        who in turn.scores
        and turn.scores[who].shape == (len(turn.answer.tokens),)
        and bool(np.isfinite(turn.scores[who]).all())
        for turn in trajectory.turns
    )


def _with_reference(samples: Sequence[Sample], trajectory: Trajectory) -> list[Sample]:
    """Their drawn tokens are those of the answers, in order."""
    scores = [np.asarray(turn.scores["reference"], np.float32) for turn in trajectory.turns]
    rest = np.concatenate(scores) if scores else np.zeros(0, np.float32)
    found: list[Sample] = []
    for sample in samples:
        is_drawn = sample.inputs["weights"] != 0
        count = int(is_drawn.sum())
        field = np.zeros(len(is_drawn), np.float32)
        field[is_drawn], rest = rest[:count], rest[count:]
        inputs = {**sample.inputs, "reference_logprobs": field}
        found.append(dataclasses.replace(sample, inputs=inputs))
    return found
