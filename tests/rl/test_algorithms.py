"""Advantages and samples against what was computed by hand, and the rules for odd groups."""

import dataclasses
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
    def scored(*scores: float, reward: float | None = None) -> Trajectory:
        one = turn([1, 2], [3, 4])
        return attempt(
            reward, dataclasses.replace(one, scores={"teacher": np.array(scores, np.float32)})
        )

    made = Distillation(coefficient=2.0).made([scored(-1.0, -1.0)])
    (sample,) = made.samples
    # The student said -0.5 and -1.5.
    assert sample.inputs["advantages"].tolist() == [0.0, -1.0, 1.0]
    made = Distillation(clip=0.25).made([scored(-9.0, -1.4)])
    assert made.samples[0].inputs["advantages"].tolist() == pytest.approx([0.0, -0.25, 0.1])
    # Without numbers of the teacher an attempt is left out, and compared all the same.
    others = [scored(-1.0), scored(float("nan"), -1.0), attempt(1.0)]
    made = Distillation().made([scored(-1.0, -1.0), *others])
    assert (len(made.samples), made.num_unscored, made.is_flat) == (1, 3, False)
    assert list(made.silent) == others
    made = Distillation().made(others)
    assert (list(made.samples), made.is_flat) == ([], True)


def test_distances_from_a_reference_are_of_its_own_tokens() -> None:
    """Two samples of one attempt, and an attempt of which the reference says nothing."""
    first, second = turn([1, 2], [3]), turn([1, 9, 7], [4, 5])
    turns = [
        dataclasses.replace(one, scores={"reference": np.array(scores, np.float32)})
        for one, scores in ((first, [-3.0]), (second, [-4.0, -5.0]))
    ]
    group = [attempt(1.0, *turns), attempt(0.0, turns[0]), attempt(0.5)]
    algorithm = Grpo(kl_coefficient=0.1, divide_by_std=False)
    assert list(algorithm.needs) == ["reference"] and not list(Grpo().needs)
    made = algorithm.made(group)
    found = [sample.inputs["reference_logprobs"].tolist() for sample in made.samples]
    assert found == [[0.0, -3.0], [0.0, 0.0, -4.0, -5.0], [0.0, -3.0]]
    assert made.num_unscored == 1 and list(made.silent) == [group[2]]
    assert [float(one.inputs["advantages"][-1]) for one in made.samples] == [0.5, 0.5, -0.5]
    for sample in made.samples:
        fields = {name: values.shape for name, values in sample.inputs.items()}
        check_fields(algorithm.loss, fields, LossConfig.of(algorithm.loss, algorithm.loss_settings))


def test_what_is_too_long_costs_before_rewards_are_compared() -> None:
    """Lengths 2 and 4 with a penalty from 2 tokens on, of 1 at 4: rewards 1, 0 become 1, -1."""
    penalty = OverlongPenalty(longest=4, cache=2)
    group = [attempt(1.0), attempt(0.0, turn([1, 2], [3, 4, 5, 6]))]
    for algorithm in (Grpo(divide_by_std=False, overlong=penalty), Rloo(overlong=penalty)):
        made = algorithm.made(group)
        expected = [1.0, -1.0] if isinstance(algorithm, Grpo) else [2.0, -2.0]
        assert [float(one.inputs["advantages"][-1]) for one in made.samples] == expected
        assert (made.num_overlong, made.penalty) == (1, -1.0)
    # Equal rewards are not equal with it, and unequal ones may be.
    equal = [attempt(1.0), attempt(1.0, turn([1, 2], [3, 4, 5, 6]))]
    assert Grpo().made(equal).is_flat and not Grpo(overlong=penalty).made(equal).is_flat
    even = [attempt(0.0), attempt(1.0, turn([1, 2], [3, 4, 5, 6]))]
    assert Grpo(overlong=penalty).made(even).is_flat
    assert Grpo(overlong=penalty).made(even).penalty == -1.0, "counted though it says nothing"
    # A truncated answer is either penalised or masked.
    assert dapo().mask_truncated and not dapo(penalty).mask_truncated
    assert dapo(penalty).overlong == penalty


def test_attempts_that_no_sample_speaks_of_are_silent() -> None:
    cut = attempt(0.0, turn([1, 2], [3, 4], finish="length"), status="truncated")
    lost, good, bad = attempt(None, status="failed"), attempt(1.0), attempt(0.0)
    made = dapo().made([cut, lost, good, bad])
    assert len(made.samples) == 2 and list(made.silent) == [cut, lost]
    group = [good, bad, lost]
    assert list(RejectionSampling().made(group).silent) == group


def test_the_penalty_for_length_begins_before_the_limit() -> None:
    penalty = OverlongPenalty(longest=100, cache=20, weight=0.5)
    assert [penalty(n) for n in (0, 80, 90, 100, 500)] == [0.0, 0.0, -0.25, -0.5, -0.5]
    with pytest.raises(ValueError, match="need 0 < cache <= longest"):
        OverlongPenalty(longest=10, cache=11)
