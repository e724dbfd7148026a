"""Playing environments: what is drawn, what ends an attempt, and what a fault costs."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Outcome, Trajectory
from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits, play_group, rollout
from suzuri.envs.task import Task
from suzuri.envs.task_env import TaskEnv, TaskGroup, TaskProblems
from suzuri.model.config import preset
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.types import Answer, Prompt, SampleParams

TOKENIZER = Tokenizer()
NANO = preset("inkling-nano")
VOCABULARY = vocabulary_of(NANO.kept_vocabulary, TOKENIZER.token_bytes)
PROMPTS = ChatPrompts(TOKENIZER, NANO, VOCABULARY)


class Scripted:
    """Answers in turn."""

    version = 3

    def __init__(self, *answers: Sequence[int], finish: str = "stop") -> None:
        self._answers, self._finish = list(answers), finish
        self.asked: list[tuple[Prompt, SampleParams]] = []

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        self.asked.append((prompt, params))
        tokens = self._answers.pop(0)
        count = len(tokens)
        return Answer(
            tokens=tokens, logprobs=[-1.0] * count, versions=[3] * count, finish=self._finish
        )


def play(env: Any, sampler: Any, **limits: Any) -> Trajectory:
    return asyncio.run(rollout(env, sampler, Limits(**limits), seed=7))


def spelled(task: Task) -> list[list[int]]:
    """The ids of each of the target's answers, as a good model would draw them."""
    renderer = ChatRenderer(TOKENIZER, NANO, local_files=True)
    found: list[list[int]] = []
    messages = list(task.messages)
    for message in task.target:
        if message["role"] == "assistant":
            before = renderer.render(messages, task.tools or None, task.effort).token_ids
            after = renderer.render(
                [*messages, message], task.tools or None, task.effort, add_generation_prompt=False
            ).token_ids
            found.append(VOCABULARY.expand(after[len(before) :]))
        messages.append(message)
    return found


@pytest.mark.parametrize(
    "kind",
    ["arithmetic", "strings", "tools/exchange", "tools/two_calls", "json", "pictures", "sounds"],
)
def test_a_good_answer_earns_the_reward_and_reads_as_a_prompt_goes_on(kind: str) -> None:
    for index in range(4):
        task = Mixture(weights={kind: 1.0}, seed=5).task(index)
        answers = spelled(task)
        sampler = Scripted(*answers)
        found = play(TaskEnv(task, PROMPTS), sampler)
        assert (found.reward, found.status, found.error) == (1.0, "over", None)
        assert len(found.turns) == len(answers)
        # Token in, token out: the next prompt begins with the one before and what was drawn.
        for turn, later in zip(found.turns, found.turns[1:], strict=False):
            known = [*turn.prompt.tokens, *turn.answer.tokens]
            assert list(later.prompt.tokens[: len(known)]) == known
        # And it is what the whole conversation is, rendered at once.
        whole = ChatRenderer(TOKENIZER, NANO, local_files=True).render(
            [*task.messages, *task.target], task.tools or None, task.effort,
            add_generation_prompt=False,
        )  # fmt: skip
        last = found.turns[-1]
        assert [*last.prompt.tokens, *last.answer.tokens] == VOCABULARY.expand(whole.token_ids)
        assert len(last.prompt.media) == len(whole.media)


def test_answers_that_spell_alike_but_are_other_tokens_stay_as_they_were_drawn() -> None:
    """R17: the environment reads "ok" drawn as two bytes, and the next prompt has the two bytes."""
    task = Mixture(weights={"tools/exchange": 1.0}, seed=5).task(1)
    first, *others = spelled(task)
    split = [
        id for token in first
        for id in (TOKENIZER.token_bytes(token) if token < 199_000 else [token])
    ]  # fmt: skip
    byte_ids = {TOKENIZER.token_bytes(id): id for id in range(256)}
    split = [byte_ids[bytes([x])] if x < 256 else x for x in split]
    assert split != first
    found = play(TaskEnv(task, PROMPTS), Scripted(split, *others))
    assert found.reward == 1.0
    start = len(found.turns[0].prompt.tokens)
    assert list(found.turns[1].prompt.tokens[start : start + len(split)]) == split


def test_wrong_and_unfinished_answers_earn_nothing() -> None:
    task = Mixture(weights={"arithmetic": 1.0}, seed=5).task(0)
    (good,) = spelled(task)
    assert play(TaskEnv(task, PROMPTS), Scripted(good[:1] + good[-1:])).reward == 0.0
    cut = play(TaskEnv(task, PROMPTS), Scripted(good[:-1], finish="length"))
    assert (cut.reward, cut.status) == (0.0, "truncated")
    twice = asyncio.run(_twice(TaskEnv(task, PROMPTS)))
    assert "used once" in twice


async def _twice(env: TaskEnv) -> str:
    await env.initial()
    with pytest.raises(RuntimeError) as error:
        await env.initial()
    return str(error.value)


class Endless:
    """Always wants one more answer."""

    def __init__(self, seconds: float = 0.0, reward: Any = 0.5) -> None:
        self.seconds, self.reward, self.prompt = seconds, reward, [1, 2, 3]

    async def initial(self) -> Prompt:
        return Prompt(tokens=self.prompt)

    async def step(self, answer: Answer) -> Outcome:
        await asyncio.sleep(self.seconds)
        self.prompt = [*self.prompt, *answer.tokens]
        return Outcome(reward=self.reward, prompt=Prompt(tokens=self.prompt), metrics={"n": 1.0})


def test_limits_end_an_attempt() -> None:
    found = play(Endless(), Scripted([5], [6], [7], [8]), max_turns=3)
    assert (found.status, found.reward, len(found.turns)) == ("truncated", 1.5, 3)
    assert found.metrics == {"n": 1.0}
    sampler = Scripted([5], [6], [7], [8])
    found = play(Endless(), sampler, max_context=5, max_tokens=9)
    assert (found.status, len(found.turns)) == ("truncated", 2)
    assert [params.max_tokens for _, params in sampler.asked] == [2, 1], "what there is room for"
    assert len({params.seed for _, params in sampler.asked}) == 2, "turns draw other numbers"


def test_an_environment_that_hangs_times_out() -> None:
    found = play(Endless(seconds=60), Scripted([5]), env_seconds=0.01)
    assert (found.status, found.reward) == ("timed_out", None)
    assert len(found.turns) == 1


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), 1e200, -2e30])
def test_a_reward_that_is_none_stays_none(reward: Any) -> None:
    found = play(Endless(reward=reward), Scripted([5], [6]), max_turns=2)
    assert (found.status, found.reward) == ("truncated", None)


class Broken(Endless):
    async def step(self, answer: Answer) -> Outcome:
        raise ZeroDivisionError("by nothing")


class Silent(Scripted):
    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        raise ValueError("the prompt is too long")


def test_what_raises_is_told_and_hurts_nobody_else() -> None:
    """R15."""
    found = play(Broken(), Scripted([5]))
    assert (found.status, found.reward) == ("failed", None)
    assert found.error == "ZeroDivisionError: by nothing"
    assert play(Endless(), Silent()).error == "ValueError: the prompt is too long"
    told = play(Endless(), Scripted([5], finish="error"))
    assert (told.status, told.reward, len(told.turns)) == ("failed", None, 1)


class Jury:
    """Rewards attempts together."""

    name = "jury"

    def __init__(self, found: Any) -> None:
        self._found = found

    def envs(self, count: int) -> list[Any]:
        return [Endless() for _ in range(count)]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def group_of(found: Any) -> list[Trajectory]:
    limits = Limits(max_turns=1)
    return asyncio.run(play_group(Jury(found), Scripted([5], [6]), limits, [1, 2]))


def test_a_group_may_judge_its_attempts_together() -> None:
    assert [one.reward for one in group_of([1.0, -1.0])] == [1.5, -0.5]
    for wrong in ([1.0], KeyError("x")):
        found = group_of(wrong)
        assert [one.reward for one in found] == [None, None]
        assert all("rewards of the group" in str(one.error) for one in found)


def test_problems_of_a_stream_of_tasks() -> None:
    mixture = Mixture(weights={"arithmetic/add2": 1.0})
    problems = TaskProblems(mixture, PROMPTS)
    group = problems.group(3)
    assert isinstance(group, TaskGroup)
    assert (problems.size, group.name, len(group.envs(4))) == (None, "arithmetic/add2", 4)


def test_an_effort_may_be_left_open() -> None:
    """The prompt then says nothing of it, and an answer may have thoughts or not."""
    mixture = Mixture(weights={"arithmetic/add2": 1.0})
    place = next(i for i in range(50) if mixture.task(i).effort == 0.0)
    (given,) = TaskProblems(mixture, PROMPTS).group(place).envs(1)
    (left_open,) = TaskProblems(mixture, PROMPTS, open_effort=True).group(place).envs(1)
    task = dataclasses.replace(mixture.task(place), effort=None)
    expected = PROMPTS.first(task.messages, [], None)
    assert asyncio.run(left_open.initial()) == expected != asyncio.run(given.initial())
    thought = {**task.target[0], "reasoning_content": "I add them."}
    assert task.grade([thought]) == 1.0 and mixture.task(place).grade([thought]) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("max_turns", 0), ("max_context", 1.5), ("env_seconds", 0.0),
     ("temperature", float("nan"))],
)  # fmt: skip
def test_limits_name_what_is_wrong(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: value})
