"""The loop over fakes: what is sampled with which weights, learned, compared and published."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from suzuri.envs.rollout import Limits
from suzuri.rl.algorithms.grpo import Grpo, dr_grpo
from suzuri.rl.algorithms.rejection import RejectionSampling
from suzuri.rl.correction import Correction, effective_sample_size
from suzuri.rl.loop import Line, Loop, Played, Schedule
from suzuri.types import AdamParams, Sample
from tests.rl.fakes import FakeProblems, FakeSampler, FakeTrainer


class Log:
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.played: list[Sequence[Played]] = []

    async def stepped(self, step: int, line: Line, played: Sequence[Played]) -> None:
        assert line["step"] == step
        self.lines.append(line)
        self.played.append(played)


class World:
    """A loop over fakes."""

    def __init__(
        self,
        judge: Any = lambda token: float(token > 4),
        *,
        size: int | None = None,
        algorithm: Any = None,
        correction: Correction | None = None,
        **schedule: Any,
    ) -> None:
        self.sampler, self.trainer, self.log = FakeSampler(), FakeTrainer(), Log()
        self.problems = FakeProblems(judge, size)
        fields: dict[str, Any] = {"steps": 4, "groups": 3, "group_size": 4} | schedule
        self.loop = Loop(
            Schedule(**fields),
            Limits(),
            self.problems,
            algorithm or Grpo(divide_by_std=False),
            self.sampler,
            self.trainer,
            self.publish,
            lambda step: AdamParams(learning_rate=0.1 * step),
            correction=correction,
        )

    async def publish(self) -> int:
        self.sampler.version = self.trainer.num_steps
        return self.sampler.version

    def run(self, first: int = 0) -> list[Line]:
        assert asyncio.run(self.loop.run(first, self.log)) == self.loop.schedule.steps
        return self.log.lines

    @property
    def versions(self) -> list[int]:
        """Of the weights that drew each answer, in the order in which they were asked for."""
        return [version for _, _, version in self.sampler.asked]


def times(lines: list[Line]) -> list[Line]:
    """Lines without what time does to them."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def test_without_lag_every_step_learns_from_its_own_weights() -> None:
    world = World()
    lines = world.run()
    assert world.versions == [step for step in range(4) for _ in range(12)]
    assert world.trainer.calls[-2:] == ["forward_backward ppo", "optim_step"]
    assert [line["sampler/version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["kl/sampler_trainer_max"] == 0.0 for line in lines)
    assert all(line["kl/tokens"] == 12 for line in lines), "flat groups are compared as well"
    assert all(line["lag/tokens:max"] == 0 for line in lines)
    assert [params.learning_rate for params in world.trainer.params] == [0.1, 0.2, 0.1 * 3, 0.4]


def test_a_difference_of_sampler_and_trainer_shows() -> None:
    world = World()
    world.trainer.off = 2**-20
    line = world.run()[0]
    assert line["kl/sampler_trainer_max"] == pytest.approx(2**-20)
    assert line["kl/sampler_trainer_mean"] == pytest.approx(-(2**-20))
    world = World()
    world.trainer.off = float("nan")
    assert world.run()[0]["kl/sampler_trainer_max"] == float("inf")


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_weights_are_behind_by_no_more_than_the_lag(lag: int) -> None:
    world = World(lag=lag, steps=6)
    lines = world.run()
    behind = [line["lag/tokens:max"] for line in lines]
    assert behind[0] == 0 < max(behind) <= lag
    found = [line["kl/sampler_trainer_max"] for line in lines]
    assert found == pytest.approx(behind), "a version is 1 in log-probs"


def test_a_run_that_goes_on_does_what_one_that_never_stopped_does() -> None:
    whole = World().run()
    world = World()
    world.trainer.num_steps = world.sampler.version = 2
    assert times(world.run(first=2)) == times(whole[2:])


def test_is_stopped_after_the_step_in_which_somebody_asks() -> None:
    world = World(lag=1)
    asked: list[bool] = []

    def is_stopped() -> bool:
        asked.append(True)
        return len(asked) == 3

    assert asyncio.run(world.loop.run(0, world.log, is_stopped)) == 2


def test_problems_of_a_set_come_once_before_one_comes_again() -> None:
    world = World(size=6)
    world.run()
    assert sorted(world.problems.indices[:6]) == sorted(world.problems.indices[6:]) == [*range(6)]
    assert world.problems.indices[:6] != world.problems.indices[6:]
    again = World(size=6)
    again.run()
    assert again.problems.indices == world.problems.indices


def test_flat_groups_are_replaced_up_to_a_bound() -> None:
    world = World(lambda token: 1.0, skip_flat=True, most_rounds=3, steps=2)
    lines = world.run()
    assert [line["groups/count"] for line in lines] == [9, 9]
    assert [line["groups/flat"] for line in lines] == [9, 9]
    assert world.trainer.calls == ["forward"] * 2, "nothing is learned, all is compared"
    assert all(line["kl/sampler_trainer_max"] == 0.0 for line in lines)
    seen = World(float, skip_flat=True)
    assert all(line["groups/count"] == 3 for line in seen.run())


@pytest.mark.parametrize(
    ("reward", "without"), [(None, 12), (float("nan"), 12), (float("inf"), 12), (0.0, 0)]
)
def test_no_reward_is_no_fault_of_the_run(reward: Any, without: int) -> None:
    lines = World(lambda token: reward).run()
    assert [line["answers/without_reward"] for line in lines] == [without] * 4
    assert lines[0]["sample/reward"] == (None if without else 0.0)


def test_what_raises_or_hangs_costs_one_attempt() -> None:
    """R15."""

    def judge(token: int) -> float:
        if token == 3:
            raise KeyError("no such answer")
        return float(token > 4)

    world = World(judge)
    lines = world.run()
    failed = sum(line["answers/failed"] for line in lines)
    tokens = [
        t.turns[0].answer.tokens[0] for p in world.log.played for g in p for t in g.trajectories
    ]
    assert failed == tokens.count(3) > 0
    errors = {t.error for p in world.log.played for g in p for t in g.trajectories if t.error}
    assert errors == {"KeyError: 'no such answer'"}


def test_minibatches_are_compared_before_the_first_step() -> None:
    world = World(minibatches=2, steps=1)
    (line,) = world.run()
    assert world.trainer.calls[-5:] == [
        "forward", "forward_backward ppo", "optim_step", "forward_backward ppo", "optim_step",
    ]  # fmt: skip
    assert line["kl/sampler_trainer_max"] == 0.0
    learned = [len(part) for part in world.trainer.seen]
    assert len(learned) == 2 and abs(learned[0] - learned[1]) <= 1


def test_a_divisor_of_answers_is_in_the_weights() -> None:
    world = World(algorithm=dr_grpo(5), steps=1)
    world.run()
    (samples,) = world.trainer.seen
    drawn = [float(sample.inputs["weights"].max()) for sample in samples]
    assert drawn == pytest.approx([1 / (5 * len(samples))] * len(samples))
    assert world.trainer.params[0].normalise is False


def test_rejection_learns_the_good_ones() -> None:
    world = World(algorithm=RejectionSampling(), steps=1)
    world.run()
    (samples,) = world.trainer.seen
    assert all(int(sample.inputs["target_tokens"][-1]) > 4 for sample in samples)


def test_a_correction_measures_how_far_the_data_are_off() -> None:
    world = World(lag=1, steps=3, correction=Correction(kind="truncate", cap=2.0))
    lines = world.run()
    # From step 2 on the sampler said 1 more than the trainer: w = exp(-1).
    sizes = [line["correction/effective_sample_size"] for line in lines]
    assert sizes == pytest.approx([1.0, 1.0, 1.0]), "all are equally far off"
    drawn = world.trainer.seen[1][0]
    assert float(drawn.inputs["weights"][-1]) == pytest.approx(np.exp(-1.0))
    assert float(drawn.inputs["logprobs"][-1]) == pytest.approx(-2.0)


def sample(q: Sequence[float]) -> Sample:
    fields = {
        "target_tokens": np.arange(len(q)),
        "weights": np.ones(len(q), np.float32),
        "logprobs": np.array(q, np.float32),
        "advantages": np.ones(len(q), np.float32),
    }
    return Sample(tokens=[0] * len(q), inputs=fields)


def test_corrections_by_hand() -> None:
    q, p = [-1.0, -1.0, -1.0], np.array([-1.0 + np.log(4), -1.0, -1.0 - np.log(4)], np.float32)
    (cut,), metrics = Correction(kind="truncate", cap=2.0).corrected([sample(q)], [p])
    assert cut.inputs["weights"].tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert metrics["correction/touched"] == pytest.approx(1 / 3)
    # (4 + 1 + 1/4)^2 / (3 (16 + 1 + 1/16))
    size = 5.25**2 / (3 * 17.0625)
    assert metrics["correction/effective_sample_size"] == pytest.approx(size)
    (masked,), metrics = Correction(kind="mask", cap=2.0).corrected([sample(q)], [p])
    assert masked.inputs["weights"].tolist() == [0.0, 1.0, 0.0]
    assert metrics["correction/touched"] == pytest.approx(2 / 3)
    (same,), _ = Correction().corrected([sample(q)], [p])
    assert same.inputs["logprobs"].tolist() == q
    assert effective_sample_size(np.zeros(0)) == 1.0
    wrong: list[dict[str, Any]] = [{"kind": "clip"}, {"cap": 0.5}, {"cap": float("nan")}]
    for fields in wrong:
        with pytest.raises(ValueError, match="must be"):
            Correction(**fields)


@pytest.mark.parametrize("field", ["steps", "groups", "group_size", "minibatches", "lag"])
def test_a_schedule_names_what_is_wrong(field: str) -> None:
    fields: dict[str, Any] = {"steps": 1, field: -1}
    with pytest.raises(ValueError, match=f"{field} = -1"):
        Schedule(**fields)
