"""Faults that RL systems of others had, one test each; docs/faults.md says which are elsewhere.

The ids are those of that page.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.envs.env import Env, Outcome, Trajectory
from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits, play_group, rollout
from suzuri.envs.task_env import TaskEnv
from suzuri.processing.chat import ChatRenderer
from suzuri.rl.algorithms.grpo import Grpo
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.run import run_rl
from suzuri.rl.samples import samples_of
from suzuri.training.checkpoint import content_hash
from suzuri.training.config import OptimizerConfig
from suzuri.types import AdamParams, Answer, Prompt, SampleParams
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, Scripted, spelled
from tests.model.models import random_model
from tests.rl.test_algorithms import ALGORITHMS
from tests.rl.test_local_sampler import draw, engine_of
from tests.rl.test_loop import World
from tests.rl.test_run import metrics, small
from tests.rl.trajectories import attempt, turn
from tests.training.samples import samples, trainer

NAMES = [f"{type(one).__name__}-{one.loss}" for one in ALGORITHMS]


def learned(algorithm: Any, group: Sequence[Trajectory]) -> list[tuple[list[int], list[float]]]:
    """(tokens, advantages) of each sample, in an order that is not that of the group."""
    return sorted(
        (list(one.tokens), [float(x) for x in one.inputs.get("advantages", [0.0])])
        for one in algorithm.made(group).samples
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
def test_r01_the_reward_of_an_empty_answer_stays_where_it_is(algorithm: Any) -> None:
    """It counts in the baseline alone; and nobody else's advantage depends on who stands beside
    it, as it would if it were written to the last place of all."""
    others = [attempt(reward, turn([1, i], [3, 4])) for i, reward in enumerate((0.0, 0.5, 1.0))]
    empty = attempt(10.0, turn([1, 2], []))
    wanted = learned(algorithm, [empty, *others])
    for place in range(1, 4):
        assert learned(algorithm, [*others[:place], empty, *others[place:]]) == wanted
    assert all(math.isfinite(x) for _, values in wanted for x in values)
    made = algorithm.made([empty, *others])
    assert made.num_empty == 1
    assert [1] not in [list(one.tokens) for one in made.samples], "nothing is learned of it"


def test_r01_in_a_run_empty_answers_are_counted_and_learned_from_nowhere() -> None:
    world = World(steps=2)
    real = world.sampler.sample

    async def sample(prompt: Prompt, params: SampleParams) -> Answer:
        answer = await real(prompt, params)
        if answer.tokens[0] > 2:
            return answer
        return Answer(tokens=[], logprobs=[], versions=[], finish="stop")

    world.sampler.sample = sample
    world.problems.group = lambda index: Lengths()  # pyright: ignore[reportAttributeAccessIssue]
    lines = world.run()
    tokens = [(params.seed or 0) % 10 for _, params, _ in world.sampler.asked]
    empty = [sum(token < 3 for token in tokens[i : i + 12]) for i in (0, 12)]
    assert [line["answers/empty"] for line in lines] == empty and all(empty)
    assert [line["groups/flat"] for line in lines] == [0, 0]
    assert [line["train/samples"] for line in lines] == [12 - count for count in empty]
    assert all(math.isfinite(line["train/loss"]) for line in lines)


class Lengths:
    """Rewards tokens, and their absence most."""

    name = "lengths"

    def envs(self, count: int) -> list[Env]:
        return [Length() for _ in range(count)]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0] * len(trajectories)


class Length:
    async def initial(self) -> Prompt:
        return Prompt(tokens=[100, 7])

    async def step(self, answer: Answer) -> Outcome:
        return Outcome(reward=float(answer.tokens[0]) if answer.tokens else 10.0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "is_flat"),
    [([1, 1, 1, 1], True), ([0] * 4, True), ([NAN, 1, NAN, NAN], True), ([NAN] * 4, True),
     ([1e30, -1e30, 1e30, -1e30], False), ([NAN, 1, 0, NAN], False)],
)  # fmt: skip
def test_r03_odd_rewards_give_numbers_and_flat_steps_are_counted(
    rewards: list[float], is_flat: bool
) -> None:
    given = iter(rewards)

    def judge(token: int) -> float:
        del token
        return next(given)

    world = World(judge, steps=1, groups=1)
    (line,) = world.run()
    assert line["answers/without_reward"] == sum(map(math.isnan, rewards))
    assert line["groups/flat"] == int(is_flat)
    assert ("optim_step" in world.trainer.calls) is not is_flat
    for batch in world.trainer.seen:
        found = [float(x) for one in batch for x in one.inputs["advantages"]]
        assert all(map(math.isfinite, found)) and any(found)


def test_r04_a_flat_group_does_not_learn_through_its_divergence_from_a_reference() -> None:
    """Documented in algorithms/group.py: it brings no samples unless `keep_flat` asks for them."""
    same = [attempt(1.0), attempt(1.0)]
    assert not Grpo(kl_coefficient=0.1).made(same).samples
    world = World(lambda token: 1.0, algorithm=Grpo(), steps=2)
    lines = world.run()
    assert [line["groups/flat"] for line in lines] == [3, 3]
    assert {call.partition(" ")[0] for call in world.trainer.calls} == {"forward"}
    assert world.trainer.num_steps == 0


def test_r07_nothing_is_read_from_a_cache_of_other_weights() -> None:
    """One prompt before and after weights that turn every choice around."""
    model, other = (random_model("tiny", torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        other.decoder.unembed.weight.neg_()
    sampler, long = LocalSampler(engine_of(model)), list(range(1, 120))

    def likeliest() -> list[int]:
        params = SampleParams(max_tokens=3, temperature=0.0)
        return list(asyncio.run(sampler.sample(Prompt(tokens=long), params)).tokens)

    def cached() -> int:
        return sampler.engine.scheduler.counters.cached_tokens

    before = likeliest()
    assert cached() == 0
    assert likeliest() == before and cached() > 100, "the cache is in use"
    hits = cached()
    asyncio.run(sampler.publish(other))
    after = likeliest()
    assert cached() == hits, "nothing was there for the new weights"
    fresh = LocalSampler(engine_of(other))
    params = SampleParams(max_tokens=3, temperature=0.0)
    assert after == list(asyncio.run(fresh.sample(Prompt(tokens=long), params)).tokens) != before
    assert set(draw(sampler, [long])[0].versions) == {1} and cached() > hits


def test_r13_a_fresh_start_over_an_old_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="it is not the folder of a run"):
        run_rl(small(tmp_path / "run"))
    assert run_rl(small(tmp_path / "other", steps=1)) == 0
    for fields in ({"seed": 5}, {"optimizer": OptimizerConfig(learning_rate=1e-5)}):
        with pytest.raises(ValueError, match="is of another run"):
            run_rl(small(tmp_path / "other", steps=2, **fields))


class Patchy:
    """A sampler in which something goes wrong with all but the first answer of a group."""

    version = 0

    def __init__(self, good: Sequence[int], broken_call: Sequence[int]) -> None:
        self._good, self._broken_call = good, broken_call

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        kind = (params.seed or 0) // 100
        if kind == 1:
            return self._answer([], "error", error="the engine lost it")
        if kind == 2:
            raise ConnectionError("no answer from the server")
        if kind == 3:
            return self._answer(self._broken_call, "stop")
        return self._answer(
            self._good[: -1 if kind == 4 else None], "length" if kind == 4 else "stop"
        )

    def _answer(self, tokens: Sequence[int], finish: str, error: str | None = None) -> Answer:
        count = len(tokens)
        return Answer(
            tokens=list(tokens), logprobs=[-1.0] * count, versions=[0] * count, finish=finish,
            error=error,
        )  # fmt: skip


class Hanging:
    async def initial(self) -> Prompt:
        return Prompt(tokens=[1])

    async def step(self, answer: Answer) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError


class Troubled:
    """Six attempts at one task that calls a tool, the last in an environment that hangs."""

    name = "troubled"

    def __init__(self, make: Any) -> None:
        self._make = make

    def envs(self, count: int) -> list[Env]:
        return [*(self._make() for _ in range(count - 1)), Hanging()]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0] * len(trajectories)


def test_r15_every_kind_of_trouble_costs_its_attempt_alone() -> None:
    """An error of the sampler, an exception, a call that is no JSON, too long an answer, and an
    environment that hangs: each by its rule (docs/rl.md)."""
    task = Mixture(weights={"tools/call": 1.0}, seed=5).task(0)
    (good,) = spelled(task)
    call = [*good[:-3], *good[-2:]]  # without what closes its JSON
    assert TOKENIZER.decode(good[-3:-2]).endswith("}}")
    limits = Limits(env_seconds=6.0)
    group = Troubled(lambda: TaskEnv(task, PROMPTS))
    sampler = Patchy(good, call)
    found = asyncio.run(play_group(group, sampler, limits, [0, 100, 200, 300, 400, 500]))
    assert [one.status for one in found] == [
        "over", "failed", "failed", "over", "truncated", "timed_out",
    ]  # fmt: skip
    assert [one.reward for one in found] == [1.0, None, None, 0.0, 0.0, None]
    assert found[1].error == "the engine lost it"
    assert found[2].error == "ConnectionError: no answer from the server"
    made = Grpo(divide_by_std=False).made(found)
    assert made.num_without_reward == 3
    values = [float(one.inputs["advantages"][-1]) for one in made.samples]
    assert values == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.slow
def test_r16_a_run_learns(tmp_path: Path) -> None:
    """On a task that chance gets right half the time the reward rises."""
    config = small(
        tmp_path / "run",
        steps=24,
        group_size=16,
        eval_problems=None,
        save_every=100,
        limits=Limits(max_tokens=2, max_context=64),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"),
    )
    assert run_rl(config) == 0
    rewards = [line["sample/reward"] for line in metrics(tmp_path / "run")]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.15


def test_r16_steps_below_the_rounding_of_bf16_add_up() -> None:
    """One is too small to be seen in the weights that are served; many of them are not lost."""
    subject = trainer("bfloat16")
    step = AdamParams(learning_rate=1e-6)
    hashes = [content_hash(subject.model)]
    name = "decoder.norm.weight"  # ones, so that half a unit in the last place is 2**-9
    served = subject.optimizer.parameters[name].detach().clone()
    for _ in range(3):
        subject.forward_backward(samples(), "cross_entropy")
        subject.optim_step(step)
        hashes.append(content_hash(subject.model))
    assert torch.equal(subject.optimizer.parameters[name], served)
    moved = (subject.optimizer.masters[name].detach() - served.detach().float()).abs()
    assert 0 < float(moved.max()) < 2**-9, "the masters did move"
    large = AdamParams(learning_rate=2**-10)
    for _ in range(6):
        subject.forward_backward(samples(), "cross_entropy")
        subject.optim_step(large)  # less than half a unit each
    assert not torch.equal(subject.optimizer.parameters[name], served)


EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def in_bytes(tokens: Sequence[int]) -> list[int]:
    """The same text, each token of text as its bytes."""
    byte_ids = {TOKENIZER.token_bytes(id): id for id in range(256)}
    return [
        byte_ids[bytes([byte])] if is_text else byte
        for token in tokens
        for is_text in [token < 199_000]
        for byte in (TOKENIZER.token_bytes(token) if is_text else [token])
    ]


@pytest.mark.parametrize("kind", ["tools/exchange", "tools/two_calls", "arithmetic", "stories"])
def test_r17_what_is_learned_are_the_tokens_that_were_drawn(kind: str) -> None:
    """In whole conversations, drawn as no tokenizer would spell them."""
    for place in range(3):
        task = Mixture(weights={kind: 1.0}, seed=5).task(place)
        answers = [in_bytes(tokens) for tokens in spelled(task)]
        found = asyncio.run(rollout(TaskEnv(task, PROMPTS), Scripted(*answers), Limits(), seed=0))
        assert (found.reward, found.error) == (1.0, None)
        (one,) = samples_of(found, 0.5)
        weights = one.inputs["weights"]
        lengths = {len(one.tokens), *(len(field) for field in one.inputs.values())}
        assert len(lengths) == 1
        drawn = [token for answer in answers for token in answer]
        assert one.inputs["target_tokens"][weights != 0].tolist() == drawn
        assert int(weights.sum()) == len(drawn) == found.num_answer_tokens
        whole = [*one.tokens, int(one.inputs["target_tokens"][-1])]
        assert whole[1:] == one.inputs["target_tokens"].tolist()


def test_r17_an_answer_of_split_emoji_is_masked_by_token() -> None:
    task = Mixture(weights={"arithmetic/add2": 1.0}, seed=5).task(0)
    renderer = ChatRenderer(TOKENIZER, NANO)
    given = renderer.render(task.messages, None, task.effort).token_ids
    said = {"role": "assistant", "content": f"12345 {EMOJI} 007"}
    whole = renderer.render(
        [*task.messages, said], None, task.effort, add_generation_prompt=False
    ).token_ids
    usual = whole[len(given) :]
    drawn = in_bytes(usual)
    assert len(drawn) > len(usual) + 10
    found = asyncio.run(rollout(TaskEnv(task, PROMPTS), Scripted(drawn), Limits(), seed=0))
    assert (found.reward, found.status) == (0.0, "over")
    (one,) = samples_of(found, 1.0)
    assert one.inputs["target_tokens"][one.inputs["weights"] != 0].tolist() == drawn
    assert PROMPTS.message(found.turns[0].answer, tools=False)["content"] == said["content"]
