"""RLOO: the baseline of an attempt is the mean of the others (Ahmadian et al., "Back to basics",
2024). No torch here."""

# pyright: strict

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.group import Made, make_samples
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.samples import Weighting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rloo:
    """A plain policy gradient, corrected for where tokens came from and clipped nowhere."""

    weighting: Weighting = "tokens"
    keep_flat: bool = False
    mask_truncated: bool = False
    overlong: OverlongPenalty | None = None
    """Taken from the reward of a long answer before rewards are compared."""

    needs: ClassVar[Collection[str]] = ()
    loss: ClassVar[str] = "importance_sampling"
    loss_settings: ClassVar[Mapping[str, float | str]] = {}
    divisor: ClassVar[Literal["weights", "answers"]] = "weights"

    def made(self, group: Sequence[Trajectory]) -> Made:
        return make_samples(
            group,
            self.advantages,
            weighting=self.weighting,
            keep_flat=self.keep_flat,
            mask_truncated=self.mask_truncated,
            overlong=self.overlong,
        )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """r less the mean of the others; there are at least two."""
        total, others = math.fsum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others for reward in rewards]
