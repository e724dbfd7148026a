"""Rejection sampling: the good attempts are learned as they are (Touvron et al., "Llama 2", 2023;
Zelikman et al., "STaR", 2022). No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.group import Made
from suzuri.rl.samples import Weighting, samples_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RejectionSampling:
    """Cross-entropy on attempts whose reward is at least `threshold`, the best `most` of a group
    (of equal ones the first); a group without any is flat."""

    threshold: float = 1.0
    most: int = 1
    weighting: Weighting = "tokens"

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most = {self.most}: must be 1 or more")

    needs: ClassVar[Collection[str]] = ()
    loss: ClassVar[str] = "cross_entropy"
    loss_settings: ClassVar[Mapping[str, float | str]] = {}
    divisor: ClassVar[Literal["weights", "answers"]] = "weights"

    def made(self, group: Sequence[Trajectory]) -> Made:
        judged = [(one.reward, one) for one in group if one.reward is not None]
        good = [pair for pair in judged if pair[0] >= self.threshold and pair[1].num_answer_tokens]
        good.sort(key=lambda pair: -pair[0])
        samples = [
            dataclasses.replace(
                sample,
                inputs={
                    k: v for k, v in sample.inputs.items() if k in ("target_tokens", "weights")
                },
            )
            for _, trajectory in good[: self.most]
            for sample in samples_of(trajectory, 0.0, weighting=self.weighting)
        ]
        return Made(
            samples=samples,
            is_flat=not samples,
            num_without_reward=len(group) - len(judged),
            num_empty=sum(not one.num_answer_tokens for _, one in judged),
            silent=group,
        )
