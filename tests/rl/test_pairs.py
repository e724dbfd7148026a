"""An algorithm over pairs of attempts (Rafailov et al., "Direct preference optimization", 2023), in
the loop as it is: there is room for what is not there yet."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.group import Made
from suzuri.rl.samples import samples_of
from suzuri.types import Array, Sample
from tests.rl.test_loop import World


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The best attempt at a problem is to be preferred to the worst."""

    beta: float = 0.5

    needs: ClassVar[Collection[str]] = ("reference",)
    loss: ClassVar[str] = "cross_entropy"
    loss_settings: ClassVar[Mapping[str, float | str]] = {}
    divisor: ClassVar[Literal["weights", "answers"]] = "answers"

    def made(self, group: Sequence[Trajectory]) -> Made:
        ranked = sorted(group, key=lambda one: one.reward or 0.0)
        worst, best = ranked[0], ranked[-1]
        if worst.reward == best.reward:
            return Made(samples=(), is_flat=True)
        margin = self.beta * (gain(best) - gain(worst))
        weight = self.beta / (1 + math.exp(margin))
        samples = [
            dataclasses.replace(
                sample,
                inputs={**sample.inputs, "weights": sample.inputs["weights"] * factor},
            )
            for one, factor in ((best, weight), (worst, -weight))
            for sample in samples_of(one, 0.0)
        ]
        kept = ("target_tokens", "weights")
        samples = [
            dataclasses.replace(one, inputs={name: one.inputs[name] for name in kept})
            for one in samples
        ]
        return Made(samples=samples, silent=group)


def gain(trajectory: Trajectory) -> float:
    """How much likelier it is than under the reference."""
    return sum(
        float(np.sum(turn.answer.logprobs) - np.sum(turn.scores["reference"]))
        for turn in trajectory.turns
    )


class Reference:
    """Log-prob of a token: a tenth of it."""

    async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        return [-one.inputs["target_tokens"].astype(np.float32) / 10 for one in samples]


def test_pairs_are_learned_in_the_loop_as_it_is() -> None:
    world = World(float, algorithm=Pairs(), scorers={"reference": Reference()}, steps=1)
    (line,) = world.run()
    (samples,) = world.trainer.seen
    pairs = [one for group in world.log.played for one in group if not one.made.is_flat]
    assert len(samples) == 2 * len(pairs) > 0
    assert world.trainer.params[0].normalise is False
    assert line["kl/sampler_trainer_max"] == 0.0 and line["kl/tokens"] == 12
    for group, (chosen, rejected) in zip(
        pairs, zip(samples[::2], samples[1::2], strict=True), strict=True
    ):
        tokens = [one.turns[0].answer.tokens[0] for one in group.trajectories]
        best, worst = max(tokens), min(tokens)
        # The loss of the pair, and its gradient, from its definition.
        p = torch.full((2,), -1.0, dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([-best / 10, -worst / 10], dtype=torch.float64)
        margin = 0.5 * ((p[0] - reference[0]) - (p[1] - reference[1]))
        (-torch.nn.functional.logsigmoid(margin)).backward()
        assert p.grad is not None
        # Cross-entropy is -w p; its sum is divided by the answers.
        weights = [float(one.inputs["weights"][-1]) for one in (chosen, rejected)]
        expected = [-float(x) / len(samples) for x in p.grad]
        assert weights == pytest.approx(expected, rel=1e-6)
        assert [int(one.inputs["target_tokens"][-1]) for one in (chosen, rejected)] == [best, worst]
