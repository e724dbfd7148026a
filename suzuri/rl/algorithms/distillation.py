"""On-policy distillation: the student answers, a teacher says how likely it finds every token
(Agarwal et al., "On-policy distillation of language models", 2024; as a per-token reward, Lu and
Thinking Machines, "On-policy distillation", 2025). No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from suzuri.envs.env import Trajectory, Turn
from suzuri.rl.algorithms.group import Made, is_scored
from suzuri.rl.samples import Weighting, samples_of
from suzuri.types import Array, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """The advantage of a token is log teacher(token) - log student(token), so that the policy
    gradient is that of the reverse divergence, token by token.

    `coefficient` scales it; `clip`: its largest magnitude before that (a token that the teacher
    rules out would drown all others), 0: any.
    """

    coefficient: float = 1.0
    clip: float = 0.0
    weighting: Weighting = "tokens"

    needs: ClassVar[Collection[str]] = ("teacher",)
    loss: ClassVar[str] = "importance_sampling"
    loss_settings: ClassVar[Mapping[str, float | str]] = {}
    divisor: ClassVar[Literal["weights", "answers"]] = "weights"

    def made(self, group: Sequence[Trajectory]) -> Made:
        """Needs no reward; an attempt without the teacher's numbers is left out."""
        scored = [one for one in group if is_scored(one, "teacher")]
        samples: list[Sample] = []
        for trajectory in scored:
            gains = [self._gain(turn) for turn in trajectory.turns]
            samples += samples_of(trajectory, gains, weighting=self.weighting)
        known = {id(one) for one in scored}
        return Made(
            samples=samples,
            is_flat=not samples,
            num_unscored=len(group) - len(scored),
            num_empty=sum(not one.num_answer_tokens for one in group),
            silent=[one for one in group if id(one) not in known],
        )

    def _gain(self, turn: Turn) -> Array:
        ours = np.asarray(turn.answer.logprobs, np.float32)
        gain = np.asarray(turn.scores["teacher"], np.float32) - ours
        return self.coefficient * (gain.clip(-self.clip, self.clip) if self.clip else gain)
