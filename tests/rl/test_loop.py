"""The loop over fakes: what is sampled with which weights, learned, compared and published."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from suzuri.rl.algorithms.grpo import Grpo, dapo, dr_grpo
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.algorithms.rejection import RejectionSampling
from suzuri.rl.algorithms.rloo import Rloo
from suzuri.rl.config import RlConfig
from suzuri.rl.correction import Correction, effective_sample_size
from suzuri.rl.drawing import Drawing, Played
from suzuri.rl.learning import Line
from suzuri.rl.loop import Loop, Published
from suzuri.training.config import OptimizerConfig
from suzuri.types import AdamParams, Sample
from tests.rl.fakes import FakeProblems, FakeSampler, FakeTrainer


class Log:
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.played: list[Sequence[Played]] = []
        self.versions: list[int] = []

    def drawn(self, step: int, version: int, groups: Sequence[Played]) -> None:
        self.versions.append(version)

    async def stepped(self, step: int, line: Line, groups: Sequence[Played]) -> None:
        assert line["step"] == step
        self.lines.append(line)
        self.played.append(groups)


class Rates(OptimizerConfig):
    """Says in which step it is."""

    def params(self, step: int, steps: int) -> AdamParams:
        return AdamParams(learning_rate=0.1 * step)


class World:
    """A loop over fakes."""

    def __init__(
        self,
        judge: Any = lambda token: float(token > 4),
        *,
        size: int | None = None,
        algorithm: Any = None,
        scorers: Any = None,
        learns: bool = True,
        **fields: Any,
    ) -> None:
        self.sampler, self.trainer, self.log = FakeSampler(), FakeTrainer(), Log()
        self.num_published = 0
        self.problems = FakeProblems(judge, size)
        given: dict[str, Any] = {"steps": 4, "groups": 3, "group_size": 4} | fields
        self.config = RlConfig(
            problems=lambda prompts: self.problems,
            algorithm=algorithm or Grpo(divide_by_std=False),
            optimizer=Rates(),
            **given,
        )
        self.loop = Loop(
            self.config,
            Drawing(self.config, self.problems, self.sampler, scorers),
            self.trainer if learns else None,
            self.publish,
            lambda: self.sampler.version,
        )

    async def publish(self) -> Published:
        """After whatever was begun has been asked for, however slow its threads are."""
        config = self.config
        self.num_published += 1
        begun = min(self.num_published + config.lag, config.steps)
        while config.lag and len(self.sampler.asked) < begun * config.groups * config.group_size:
            await asyncio.sleep(0.001)
        self.sampler.version = self.trainer.num_steps
        return Published(version=self.sampler.version, metrics={"publish/pause_seconds": 0.5})

    def run(self, first: int = 0) -> list[Line]:
        assert asyncio.run(self.loop.run(first, self.log)) == self.config.steps
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


def test_all_that_is_masked_takes_no_step() -> None:
    """In step 2 every token is exp(-2) times as likely as when it was drawn; step 3 is drawn with
    the weights that step 2 left as they were."""
    world = World(lag=1, steps=3, correction=Correction(kind="mask", cap=2.0), minibatches=2)
    lines = world.run()
    assert [line["train/without_weight"] for line in lines] == [0, 2, 0]
    assert world.trainer.calls.count("optim_step") == 4
    assert [line["correction/touched"] for line in lines] == [0.0, 1.0, 0.0]
    assert "optim/grad_norm" not in lines[1] and "train/loss" not in lines[1]
    assert [line["sampler/version"] for line in lines] == [2, 2, 4]


@pytest.mark.parametrize("algorithm", [Grpo(), Rloo(), dr_grpo(4), RejectionSampling()])
@pytest.mark.parametrize("group_size", [1, 2])
def test_nothing_to_compare_is_nothing_to_learn(algorithm: Any, group_size: int) -> None:
    """One attempt at a problem, or attempts that are all worth the same."""
    world = World(lambda token: 0.25, algorithm=algorithm, group_size=group_size, steps=2)
    lines = world.run()
    assert [line["groups/flat"] for line in lines] == [3, 3]
    assert all(line["kl/tokens"] == 3 * group_size for line in lines)
    assert world.trainer.calls == ["forward"] * 2
    assert not any(np.isnan(x) for line in lines for x in line.values() if isinstance(x, float))


def test_a_batch_of_which_nothing_came_is_a_step_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(prompt: Any) -> None:
        raise RuntimeError("no sampler")

    world = World(steps=2)
    world.sampler.fault = broken
    lines = world.run()
    assert [line["answers/failed"] for line in lines] == [12, 12]
    (told,) = (record.getMessage() for record in caplog.records)  # once, not 24 times
    assert told.startswith("step 1: ") and "no sampler" in told
    assert [line["kl/tokens"] for line in lines] == [0, 0]
    assert [line["sample/reward"] for line in lines] == [None, None]
    assert world.trainer.calls == []


def test_rewards_that_are_no_numbers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Else a run without a single reward ends as if all were well."""
    lines = World(lambda token: None, steps=2).run()
    assert [line["answers/without_reward"] for line in lines] == [12, 12]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("step 1: an attempt has no reward, over: NaN, ")


def test_what_no_sample_speaks_of_is_compared_as_well() -> None:
    """Attempts that were masked or have no reward, and the others of a group of which the best is
    learned."""

    def judge(token: int) -> float | None:
        return None if token == 3 else float(token > 4)

    for algorithm in (Grpo(), RejectionSampling(), Grpo(mask_truncated=True)):
        world = World(judge, algorithm=algorithm)
        assert all(line["kl/tokens"] == 12 for line in world.run())
        world.trainer.off = 2**-20
    world = World(judge, algorithm=RejectionSampling(), minibatches=2)
    world.trainer.off = 2**-20
    assert world.run()[0]["kl/sampler_trainer_max"] == pytest.approx(2**-20)


def test_the_penalty_for_length_is_counted() -> None:
    """Answers of one token, of which every one is too long."""
    penalty = OverlongPenalty(longest=2, cache=2, weight=0.5)
    world = World(algorithm=dapo(penalty), steps=2)
    for line in world.run():
        assert line["answers/overlong"] == 12
        assert line["answers/overlong:penalty"] == pytest.approx(-0.25)
        assert line["answers/masked"] == 0


def test_drawing_alone_shows_batches_and_learns_nothing() -> None:
    world = World(learns=False, steps=3)
    lines = world.run()
    assert world.trainer.calls == [] and world.log.versions == [0, 0, 0]
    assert not any(name.startswith(("train/", "kl/", "sampler/")) for name in lines[0])
    learning = World(steps=3)
    found = learning.run()
    same = [name for name in lines[0] if not name.startswith("time/")]
    assert [lines[0][name] for name in same] == [found[0][name] for name in same]
    assert found[0]["publish/pause_seconds"] == 0.5


def test_a_sampler_that_is_lost_ends_the_run_and_what_it_draws_ahead() -> None:
    class Lost(RuntimeError):
        pass

    world = World(lag=2)

    async def publish() -> Published:
        raise Lost("gone")

    world.loop = Loop(
        world.config,
        Drawing(world.config, world.problems, world.sampler),
        world.trainer,
        publish,
        lambda: 0,
    )

    async def run() -> int:
        with pytest.raises(Lost):
            await world.loop.run(0, world.log)
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(run()) == 0
