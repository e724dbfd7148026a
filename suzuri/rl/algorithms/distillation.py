"""On-policy distillation: the student answers, a teacher says how likely it finds every token
(Agarwal et al., "On-policy distillation of language models", 2024; as a per-token reward, Lu and
Thinking Machines, "On-policy distillation", 2025). No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.group import Made
from suzuri.rl.samples import Weighting, samples_of
from suzuri.types import Array


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

    loss: ClassVar[str] = "importance_sampling"
    loss_settings: ClassVar[Mapping[str, float | str]] = {}
    divisor: ClassVar[Literal["weights", "answers"]] = "weights"

    def distilled(self, trajectory: Trajectory, teacher: Sequence[Array]) -> Made:
        """`teacher`: for each turn the log-probs [T] that it gives the answer's tokens. Needs no
        reward. ValueError where they are not as many as the tokens, or no numbers."""
        advantages: list[Array] = []
        for place, (turn, theirs) in enumerate(zip(trajectory.turns, teacher, strict=True)):
            ours = np.asarray(turn.answer.logprobs, np.float32)
            if theirs.shape != ours.shape or not np.isfinite(theirs).all():
                raise ValueError(
                    f"the teacher gave {list(theirs.shape)} log-probs, or some that are none, "
                    f"for the {len(ours)} tokens of answer {place}"
                )
            gain = theirs.astype(np.float32) - ours
            if self.clip:
                gain = gain.clip(-self.clip, self.clip)
            advantages.append(self.coefficient * gain)
        samples = samples_of(trajectory, advantages, weighting=self.weighting)
        return Made(samples=samples, num_empty=int(not trajectory.num_answer_tokens))
