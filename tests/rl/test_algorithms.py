"""Advantages and samples against what was computed by hand, and the rules for odd groups."""

import math
from typing import Any

import numpy as np
import pytest

from suzuri.envs.env import Trajectory
from suzuri.rl.algorithms.distillation import Distillation
from suzuri.rl.algorithms.grpo import Grpo, cispo, dapo, dr_grpo, gspo
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.algorithms.rejection import RejectionSampling
from suzuri.rl.algorithms.rloo import Rloo
from suzuri.training.losses import LossConfig, check_fields
from tests.rl.trajectories import attempt, turn

ALGORITHMS: list[Any] = [Grpo(), dr_grpo(10), dapo(), gspo(), cispo(), Rloo(), RejectionSampling()]


def advantages(algorithm: Any, rewards: list[float | None]) -> list[float]:
    """Of each sample, at its first drawn token."""
    made = algorithm.made([attempt(reward) for reward in rewards])
    return [float(sample.inputs["advantages"][-1]) for sample in made.samples]


def test_grpo_is_the_reward_in_deviations_of_its_group() -> None:
    # mean 0.5, squares of distances 0.25, 0.25, 0.25, 0.25: deviation 0.5.
    assert advantages(Grpo(), [1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1], rel=1e-5)
    # mean 2, squares 4, 0, 4: deviation sqrt(8/3).
    d = math.sqrt(8 / 3)
    assert advantages(Grpo(), [0.0, 2.0, 4.0]) == pytest.approx([-2 / d, 0, 2 / d], rel=1e-5)


def test_dr_grpo_divides_by_neither_deviation_nor_length() -> None:
    algorithm = dr_grpo(10)
    assert advantages(algorithm, [0.0, 2.0, 4.0]) == pytest.approx([-2, 0, 2])
    group = [attempt(1.0, turn([1], [2, 3, 4])), attempt(0.0, turn([1], [5]))]
    weights = [sample.inputs["weights"].tolist() for sample in algorithm.made(group).samples]
    assert weights == [pytest.approx([0.1, 0.1, 0.1]), pytest.approx([0.1])]
    assert algorithm.divisor == "answers"


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert advantages(Rloo(), [1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("tokens", [1.0, 1.0]), ("answers", [0.5, 0.5]), ("constant", [0.25, 0.25])],
)
def test_weights_of_tokens(weighting: Any, expected: list[float]) -> None:
    algorithm = Grpo(weighting=weighting, longest=4)
    first = algorithm.made([attempt(1.0), attempt(0.0)]).samples[0]
    assert first.tokens == [1, 2, 3]
    assert first.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert first.inputs["weights"].tolist() == [0.0, *expected]
    assert first.inputs["logprobs"].tolist() == [0.0, -0.5, -1.5]


def test_the_presets_have_the_bounds_of_their_papers() -> None:
    def bounds(algorithm: Grpo) -> tuple[float, float]:
        settings = LossConfig.of(algorithm.loss, algorithm.loss_settings)
        return settings.clip_low_threshold, settings.clip_high_threshold

    assert bounds(Grpo()) == (0.8, 1.2)
    assert bounds(dapo()) == (0.8, 1.28)
    assert bounds(gspo()) == pytest.approx((1 - 3e-4, 1 + 4e-4))
    assert bounds(cispo()) == (0.0, 1.28)
    assert [a.loss for a in (dapo(), gspo(), cispo())] == ["ppo", "gspo", "cispo"]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{type(a).__name__}-{a.loss}")
def test_samples_have_the_fields_of_their_loss(algorithm: Any) -> None:
    made = algorithm.made([attempt(1.0), attempt(0.0)])
    assert made.samples
    for sample in made.samples:
        fields = {name: values.shape for name, values in sample.inputs.items()}
        check_fields(algorithm.loss, fields, LossConfig.of(algorithm.loss, algorithm.loss_settings))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{type(a).__name__}-{a.loss}")
@pytest.mark.parametrize(
    "rewards",
    [[], [1.0], [0.5, 0.5, 0.5], [None, None], [None, 0.3, None], [0.0, 0.0]],
    ids=str,
)
def test_groups_that_say_nothing_bring_nothing(algorithm: Any, rewards: list[Any]) -> None:
    """R03: equal rewards, one reward, none."""
    made = algorithm.made([attempt(reward) for reward in rewards])
    is_good = isinstance(algorithm, RejectionSampling) and 1.0 in rewards
    assert made.is_flat is not is_good
    assert bool(made.samples) is is_good
    assert made.num_without_reward == rewards.count(None)


def test_flat_groups_are_kept_where_asked_with_advantage_zero() -> None:
    """R03, R04: for terms without an advantage, such as a divergence from a reference."""
    made = Grpo(keep_flat=True).made([attempt(1.0), attempt(1.0)])
    assert made.is_flat
    assert [sample.inputs["advantages"].tolist() for sample in made.samples] == [[0.0] * 3] * 2
    assert not Grpo(kl_coefficient=0.1).made([attempt(1.0), attempt(1.0)]).samples


def test_huge_rewards_give_finite_advantages() -> None:
    """R03."""
    assert advantages(Grpo(), [1e30, -1e30]) == pytest.approx([1.0, -1.0])
    assert all(map(math.isfinite, advantages(Rloo(), [1e30, -1e30])))


def test_an_empty_answer_counts_in_the_baseline_and_nowhere_else() -> None:
    """R01: four attempts, one of them without a token and with reward 10."""
    group = [attempt(10.0, turn([1, 2], [])), attempt(0.0), attempt(1.0), attempt(1.0)]
    made = Grpo(divide_by_std=False).made(group)
    assert made.num_empty == 1
    found = [float(sample.inputs["advantages"][-1]) for sample in made.samples]
    assert found == pytest.approx([-3.0, -2.0, -2.0])


def test_attempts_without_a_reward_do_not_move_the_baseline() -> None:
    """R15."""
    group = [attempt(None, status="failed"), attempt(1.0), attempt(0.0)]
    made = Grpo(divide_by_std=False).made(group)
    assert made.num_without_reward == 1
    assert [float(s.inputs["advantages"][-1]) for s in made.samples] == [0.5, -0.5]


def test_truncated_attempts_are_learned_or_masked() -> None:
    cut = attempt(0.0, turn([1, 2], [3, 4], finish="length"), status="truncated")
    assert len(Grpo().made([cut, attempt(1.0)]).samples) == 2
    made = dapo().made([cut, attempt(1.0)])
    assert (len(made.samples), made.num_masked) == (1, 1)
    assert float(made.samples[0].inputs["advantages"][-1]) == pytest.approx(1.0, rel=1e-5)


def test_turns_that_go_on_are_one_sample_and_others_are_not() -> None:
    going_on = attempt(1.0, turn([1, 2], [3]), turn([1, 2, 3, 7, 8], [4, 5]))
    anew = attempt(0.0, turn([1, 2], [3]), turn([1, 9, 7], [4, 5]))
    made = Grpo(divide_by_std=False, weighting="answers").made([going_on, anew])
    one, *others = made.samples
    assert [*one.tokens, int(one.inputs["target_tokens"][-1])] == [1, 2, 3, 7, 8, 4, 5]
    third = pytest.approx(1 / 3)
    assert one.inputs["weights"].tolist() == [0, third, 0, 0, third, third]
    assert one.inputs["logprobs"].tolist() == [0, -0.5, 0, 0, -0.5, -1.5]
    assert one.inputs["advantages"].tolist() == [0, 0.5, 0, 0, 0.5, 0.5]
    assert [list(s.tokens) for s in others] == [[1, 2], [1, 9, 7, 4]]
    assert sum(float(s.inputs["weights"].sum()) for s in others) == pytest.approx(1.0)


def test_rejection_keeps_the_best_of_those_that_are_good() -> None:
    group: list[Trajectory] = [
        attempt(0.9, turn([1], [2])), attempt(0.5, turn([1], [3])), attempt(1.0, turn([1], [4])),
        attempt(0.95, turn([1], [5])),
    ]  # fmt: skip
    made = RejectionSampling(threshold=0.9, most=2).made(group)
    assert [s.inputs["target_tokens"].tolist() for s in made.samples] == [[4], [5]]
    with pytest.raises(ValueError, match="most = 0"):
        RejectionSampling(most=0)


def test_distillation_weighs_every_token_by_what_the_teacher_says() -> None:
    trajectory = attempt(None, turn([1, 2], [3, 4]))
    made = Distillation(coefficient=2.0).distilled(trajectory, [np.array([-1.0, -1.0])])
    (sample,) = made.samples
    # The student said -0.5 and -1.5.
    assert sample.inputs["advantages"].tolist() == [0.0, -1.0, 1.0]
    made = Distillation(clip=0.25).distilled(trajectory, [np.array([-9.0, -1.4])])
    assert made.samples[0].inputs["advantages"].tolist() == pytest.approx([0.0, -0.25, 0.1])
    for wrong in (np.array([-1.0]), np.array([np.nan, -1.0])):
        with pytest.raises(ValueError, match="the teacher gave"):
            Distillation().distilled(trajectory, [wrong])


def test_the_penalty_for_length_begins_before_the_limit() -> None:
    penalty = OverlongPenalty(longest=100, cache=20, weight=0.5)
    assert [penalty(n) for n in (0, 80, 90, 100, 500)] == [0.0, 0.0, -0.25, -0.5, -0.5]
    with pytest.raises(ValueError, match="need 0 < cache <= longest"):
        OverlongPenalty(longest=10, cache=11)
