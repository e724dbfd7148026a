"""GRPO: the advantage of an attempt is its reward against those of its group (Shao et al.,
"DeepSeekMath", 2024), and its variants. No torch here."""

# pyright: strict

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.group import Made, make_samples
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.samples import Weighting

MIN_STD = 1e-6
"""Added to the deviation, as by Shao et al.'s implementations: near-equal rewards stay small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo:
    """With the defaults, PPO's clipped loss with both bounds 0.2 away (Shao et al., 2024), every
    token counting alike.

    `divide_by_std`: advantages in deviations of the group. Off, with weighting "constant" and
    divisor "answers", it is Dr. GRPO (Liu et al., 2025): `dr_grpo`. With clip_high 0.28 and
    mask_truncated it has DAPO's loss (Yu et al., 2025): `dapo`.
    """

    divide_by_std: bool = True
    clip_low: float = 0.2
    """Least ratio: 1 less this."""
    clip_high: float = 0.2
    """Greatest ratio: 1 and this."""
    dual_clip: float = 0.0
    """Bound of the loss for negative advantages (training/losses.py); 0: none."""
    weighting: Weighting = "tokens"
    divisor: Literal["weights", "answers"] = "weights"
    longest: int = 1
    """Tokens by which weighting "constant" divides."""
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    keep_flat: bool = False
    mask_truncated: bool = False
    overlong: OverlongPenalty | None = None
    """Taken from the reward of a long answer before rewards are compared."""
    loss: str = "ppo"

    @property
    def needs(self) -> Collection[str]:
        return ("reference",) if self.kl_coefficient else ()

    @property
    def loss_settings(self) -> Mapping[str, float | str]:
        found: dict[str, float | str] = {}
        if self.loss in ("ppo", "gspo", "cispo"):
            found["clip_low_threshold"] = 1 - self.clip_low
            found["clip_high_threshold"] = 1 + self.clip_high
        if self.dual_clip:
            found["dual_clip"] = self.dual_clip
        if self.kl_coefficient:
            found["kl_coefficient"] = self.kl_coefficient
        if self.entropy_coefficient:
            found["entropy_coefficient"] = self.entropy_coefficient
        return found

    def made(self, group: Sequence[Trajectory]) -> Made:
        return make_samples(
            group,
            self.advantages,
            weighting=self.weighting,
            keep_flat=self.keep_flat,
            mask_truncated=self.mask_truncated,
            longest=self.longest,
            overlong=self.overlong,
            with_reference=bool(self.kl_coefficient),
        )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """r less the mean, over the deviation (of the population) where asked."""
        mean = statistics.fmean(rewards)
        if not self.divide_by_std:
            return [reward - mean for reward in rewards]
        std = statistics.pstdev(rewards, mean)
        return [(reward - mean) / (std + MIN_STD) for reward in rewards]


def dr_grpo(longest: int) -> Grpo:
    """Without the two biases that Liu et al. ("Understanding R1-Zero-like training", 2025) found:
    no deviation, and no length in the divisor. `longest`: tokens that an answer may have."""
    return Grpo(divide_by_std=False, weighting="constant", divisor="answers", longest=longest)


def dapo(overlong: OverlongPenalty | None = None) -> Grpo:
    """The loss of Yu et al. (2025): clip-higher, every token alike, and of over-long answers either
    a penalty or, without one, nothing that is learned. Their dynamic sampling is `skip_flat` of the
    config."""
    return Grpo(clip_high=0.28, mask_truncated=overlong is None, overlong=overlong)


def gspo() -> Grpo:
    """One ratio per answer (Zheng et al., 2025), with their bounds."""
    return Grpo(loss="gspo", clip_low=3e-4, clip_high=4e-4, weighting="answers")


def cispo() -> Grpo:
    """Clipped ratios that keep every token's gradient (MiniMax-M1, 2025): no lower bound."""
    return Grpo(loss="cispo", clip_low=1.0, clip_high=0.28)
