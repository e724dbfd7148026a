"""Problems and rewards by dotted path: what is missing is named, a fault costs one attempt."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suzuri.envs.dotted import NamedProblems, NamedReward
from suzuri.envs.env import Trajectory
from suzuri.envs.rollout import Limits, play_group
from suzuri.envs.verifiable import JsonlProblems
from suzuri.processing.chat import ChatRenderer
from suzuri.rl.algorithms.group import make_samples
from suzuri.types import Answer, Prompt, SampleParams
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted

MODULE = '''
import time

def length(prompt, turns, answer):
    assert prompt[-1]["role"] == "user" and turns[-1]["role"] == "assistant"
    return len(turns[-1]["content"]) + (answer or 0)

def odd(prompt, turns, answer):
    """Does what the answer says."""
    text = turns[-1]["content"]
    if text == "raise":
        raise KeyError("no such thing")
    if text == "hang":
        time.sleep(600)
    if text == "leave":
        raise SystemExit(0)
    return {"nan": float("nan"), "inf": float("inf"), "string": "0.5", "nothing": None,
            "list": [1.0], "true": True}.get(text, 0.25)

async def judge(prompt, turns, answer):
    if turns[-1]["content"] == "raise":
        raise KeyError("no such thing")
    return 0.75

def two(prompt, turns):
    return 0.0

number = 3

class Group:
    name = "mine"
    def envs(self, count):
        return [Env() for _ in range(count)]
    async def rewards(self, trajectories):
        return [0.0] * len(trajectories)

class Env:
    async def initial(self): ...
    async def step(self, answer): ...

class Problems:
    def __init__(self, prompts, size=3):
        self.size = size
    def group(self, index):
        return Group()

class Sizeless:
    def __init__(self, prompts): ...
    def group(self, index): ...

class Silent(Problems):
    def group(self, index):
        return Env()

class Still(Problems):
    def group(self, index):
        group = Group()
        group.envs = lambda count: [Group()] * count
        return group
'''


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(MODULE, "utf-8")
    (package / "broken.py").write_text("1 / 0\n")
    (package / "wants.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mine.parts", 'must be "package.module:name"'),
        (":length", 'must be "package.module:name"'),
        ("mine.parts:", 'must be "package.module:name"'),
        ("yours.parts:length", "no module yours; install it, or name its folder in PYTHONPATH"),
        ("mine.other:length", "no module mine.other"),
        ("mine.wants:length", "mine.wants imports no_such_package, which is not installed"),
        ("mine.broken:length", "importing mine.broken raised ZeroDivisionError: division by zero"),
        ("mine.parts:lenght", "mine.parts has no lenght; near it: length"),
        ("mine.parts:number", "is no function"),
        ("mine.parts:two", "must take prompt, turns, answer"),
    ],
)
def test_a_reward_that_is_missing_is_named(path: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        NamedReward(path)
    assert repr(path) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    ("path", "settings", "said"),
    [
        ("mine.parts:number", {}, "is no class or function"),
        ("mine.parts:Problems", {"sizes": 3}, "unexpected keyword argument 'sizes'"),
        ("mine.parts:Problems", {"size": 0}, "there are none (size = 0)"),
        ("mine.parts:Sizeless", {}, "a Sizeless without size"),
        ("mine.parts:Silent", {}, "a Env without name and envs and rewards"),
        ("mine.parts:Still", {}, "a Group without initial and step"),
        ("mine.parts:Problem", {}, "near it: Problems"),
    ],
)
def test_problems_name_what_is_missing(path: str, settings: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        NamedProblems(path=path, settings=settings)(PROMPTS)
    assert repr(path) in str(error.value) and said in str(error.value)


def test_problems_of_somebodys_own() -> None:
    make = NamedProblems(path="mine.parts:Problems", settings={"size": 5})
    assert make(PROMPTS).size == 5
    assert "mine.parts:Problems" in repr(make), "so a run is known by it"


class Seeded(Scripted):
    """Gives the attempt of seed i the i-th answer, whichever asks first."""

    def __init__(self, *answers: list[int], finish: str = "stop") -> None:
        super().__init__(finish=finish)
        self._by_seed = answers

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        self._answers = [self._by_seed[params.seed or 0]]
        return await super().sample(prompt, params)


def play(tmp_path: Path, path: str, *texts: str, **fields: Any) -> list[Trajectory]:
    """Attempts at the one problem of a file, each of which says one of the texts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "?", "reward": path, "reasoning_effort": 0, **fields}))
    problems = JsonlProblems([str(file)], PROMPTS, reward_seconds=4.0)
    renderer = ChatRenderer(TOKENIZER, NANO)
    asked = [{"role": "user", "content": "?"}]
    given = renderer.render(asked, None, 0.0).token_ids
    answers = [
        VOCABULARY.expand(
            renderer.render(
                [*asked, {"role": "assistant", "content": text}], None, 0.0,
                add_generation_prompt=False,
            ).token_ids[len(given) :]
        )
        for text in texts
    ]  # fmt: skip
    sampler, limits = Seeded(*answers), Limits(env_seconds=250.0)
    return asyncio.run(play_group(problems.group(0), sampler, limits, range(len(texts))))


def test_a_reward_of_somebodys_own(tmp_path: Path) -> None:
    found = play(tmp_path, "mine.parts:length", "abc", "abcde", answer=10)
    assert [one.reward for one in found] == [13.0, 15.0]
    found = play(tmp_path, "mine.parts:length", "abc")
    assert [one.reward for one in found] == [3.0]


def test_what_goes_wrong_in_a_reward_costs_its_attempt_alone(tmp_path: Path) -> None:
    """Raised, hung, gone, and what is no number: no reward; the others are learned from."""
    texts = ("raise", "hang", "leave", "string", "nothing", "list", "nan", "inf", "true", "fine")
    found = play(tmp_path, "mine.parts:odd", *texts)
    errors = dict(zip(texts, (one.error for one in found), strict=True))
    assert "KeyError: 'no such thing'" in str(errors["raise"])
    assert "took more than 4 s" in str(errors["hang"])
    assert "its process ended" in str(errors["leave"])
    assert "gave '0.5': must be a number" in str(errors["string"])
    assert "'mine.parts:odd' gave 'None': must be a number" in str(errors["nothing"])
    assert "must be a number" in str(errors["list"])
    assert [one.status for one in found[6:]] == ["over"] * 4
    assert {one.status for one in found[:6]} <= {"failed", "timed_out"}
    assert [one.reward for one in found] == [None] * 8 + [1.0, 0.25]
    made = make_samples(found, lambda rewards: [reward - 0.5 for reward in rewards])
    assert (made.num_without_reward, len(made.samples)) == (8, 2)


def test_an_async_reward_is_awaited(tmp_path: Path) -> None:
    found = play(tmp_path, "mine.parts:judge", "fine", "raise")
    assert [(one.reward, one.status) for one in found] == [(0.75, "over"), (None, "failed")]
    assert found[1].error == "KeyError: 'no such thing'"


def test_lines_name_the_reward_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "?", "reward": "mine.parts:length"},
        {"prompt": "?", "reward": "mine.parts:lenght"},
        {"prompt": "?", "reward": "mine.parts:length", "grader": "exact", "answer": 1},
        {"prompt": "?", "reward": 3},
        {"prompt": "?", "answer": 1, "grader": "exact"},
        {"prompt": "?"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError) as error:
        JsonlProblems([str(file)], PROMPTS)
    said = str(error.value)
    assert f"{file}:2: reward 'mine.parts:lenght'" in said and f"{file}:1:" not in said
    assert f"{file}:3: give either reward, or grader and extract" in said
    assert f"{file}:4: reward 3: must be" in said and f"{file}:5:" not in said
    assert f"{file}:6: no answer to check against" in said
    with pytest.raises(ValueError) as error:
        JsonlProblems([str(file)], PROMPTS, reward="mine.parts:length")
    assert f"{file}:6:" not in str(error.value), "it has the reward of the recipe"
