"""reasoning-gym as problems: over a module of that name made here, and over the real one if it is
installed."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suzuri.envs import gym, gym_worker
from suzuri.envs.gym import Gym, GymGroup, GymProblems
from suzuri.envs.rollout import Limits, play_group
from suzuri.envs.task import split_of
from suzuri.envs.workers import CallLimits, Workers
from suzuri.processing.chat import ChatRenderer
from tests.envs.test_dotted import Seeded
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted

LIBRARY = '''
"""Stands for reasoning-gym: families whose scorers are known."""
import dataclasses, random, sys, time, types

@dataclasses.dataclass
class Config:
    digits: int = 2
    seed: int = 0
    size: int = 500
    def validate(self):
        assert self.digits > 0, "digits must be positive"

class Family:
    def __init__(self, config):
        config.validate()
        self.config = config
    def __getitem__(self, index):
        rng = random.Random(self.config.seed + index)
        a, b = (rng.randrange(10 ** self.config.digits) for _ in range(2))
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"sum": {a, b}}}
    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])

class Unordered(Family):
    def __getitem__(self, index):
        return {"question": " ".join({f"{self.config.seed}-{index}-{i}" for i in range(30)}),
                "answer": None, "metadata": {}}

class Careless(Family):
    """Draws from the generator of the process."""
    def __getitem__(self, index):
        a = random.randrange(10 ** 9)
        return {"question": f"Say {a}.", "answer": str(a), "metadata": {}}

class Odd(Family):
    def score_answer(self, answer, entry):
        if answer == "raise":
            return int("x")
        if answer == "hang":
            time.sleep(600)
        if answer == "leave":
            sys.exit(3)
        odd = {"nan": float("nan"), "high": 1.5, "low": -1.0, "none": None, "part": 0.5,
               "rounded": 1.0000000000000002}
        return odd.get(answer, float(entry["answer"] in answer))

class Broken(Family):
    """Takes its own answer one time in two."""
    def score_answer(self, answer, entry):
        return float(int(entry["answer"]) % 2 == 0)

class Never(Family):
    def score_answer(self, answer, entry):
        raise ZeroDivisionError("by nothing")

DATASETS = {name: (kind, Config) for name, kind in
            {"adding": Family, "unordered": Unordered, "careless": Careless, "odd": Odd,
             "broken": Broken, "never": Never, "composite": Family}.items()}
factory = types.SimpleNamespace(DATASETS=DATASETS)

def create_dataset(name, **fields):
    kind, config = DATASETS[name]
    return kind(config(**fields))
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "reasoning_gym.py").write_text(LIBRARY, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield


def made(gym: Gym, places: range) -> list[tuple[str, str]]:
    """(name, question) of places."""
    problems = GymProblems(gym, PROMPTS)

    async def items() -> list[tuple[str, str]]:
        groups = [problems.group(place) for place in places]
        return [(group.name, (await group.item())["question"]) for group in groups]

    return asyncio.run(items())


def scores(gym: Gym, *texts: str) -> list[tuple[float, bool]]:
    """Of texts on place 0; "OWN" stands for its own answer."""
    problems = GymProblems(gym, PROMPTS)

    async def found() -> list[tuple[float, bool]]:
        group = problems.group(0)
        a, b = (await group.item())["question"].removesuffix("?").split(" + ")
        own = str(int(a) + int(b))
        return [await group.score(text.replace("OWN", own)) for text in texts]

    return asyncio.run(found())


@pytest.mark.usefixtures("library")
def test_a_place_is_the_same_problem_in_every_process() -> None:
    """Whatever the order of sets, the generator of the process, and what was made before."""
    weights = {"adding": 1.0, "unordered": 1.0, "careless": 1.0}
    here = made(Gym(families=weights), range(12))
    assert {name for name, _ in here} == {"gym/adding", "gym/unordered", "gym/careless"}
    assert len(set(here)) == 12
    assert made(Gym(families=weights), range(12)) == here
    assert made(Gym(families=weights), range(11, -1, -1)) == here[::-1]
    assert made(Gym(families=weights, seed=1), range(12)) != here


@pytest.mark.usefixtures("library")
def test_the_splits_have_no_question_in_common() -> None:
    """Although there are only 100 questions."""
    few = {"adding": {"digits": 1}}
    sides = {
        split: {question for _, question in made(Gym(families="adding", split=split, settings=few),
                                                 range(60))}
        for split in ("train", "held_out")
    }  # fmt: skip
    for split, questions in sides.items():
        assert {split_of(f"adding:{question}") for question in questions} == {split}
    assert sides["train"] and sides["held_out"]


@pytest.mark.usefixtures("library")
def test_settings_reach_the_family_and_weights_choose() -> None:
    weights = {"adding": 1.0, "unordered": 0.0}
    found = made(Gym(families=weights, settings={"adding": {"digits": 6}}), range(5))
    assert all(name == "gym/adding" and len(question) > 9 for name, question in found)


@pytest.mark.usefixtures("library")
def test_the_scorer_of_the_family_grades() -> None:
    assert scores(Gym(families="adding"), "OWN", "OWN OWN", "x", "") == [
        (1.0, True), (0.0, True), (0.0, True), (0.0, True),
    ]  # fmt: skip


@pytest.mark.usefixtures("library")
def test_what_the_scorer_cannot_say_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised, hung, gone, NaN, out of 0 to 1: it scores 0 and is told to be so."""
    monkeypatch.setattr(gym, "SCORE_LIMITS", CallLimits(cpu_seconds=None, wall_seconds=4.0))
    faults = ("raise", "hang", "leave", "nan", "high", "low", "none")
    found = scores(Gym(families="odd", partial=True), *faults)
    assert found == [(0.0, False)] * len(faults)
    assert scores(Gym(families="odd"), "rounded", "OWN") == [(1.0, True)] * 2


@pytest.mark.usefixtures("library")
def test_part_of_a_score_counts_only_where_it_is_asked_for() -> None:
    assert scores(Gym(families="odd"), "part") == [(0.0, True)]
    assert scores(Gym(families="odd", partial=True), "part") == [(0.5, True)]


@pytest.mark.usefixtures("library")
def test_lists_of_answers_earn_nothing_where_the_scorer_looks_for_one() -> None:
    every = " ".join(map(str, range(200)))
    assert scores(Gym(families="odd"), "so: OWN", every) == [(1.0, True), (0.0, True)]


@pytest.mark.usefixtures("library")
def test_items_whose_own_answer_is_not_taken_are_passed_over() -> None:
    for _, question in made(Gym(families="broken"), range(8)):
        a, b = question.removesuffix("?").split(" + ")
        assert (int(a) + int(b)) % 2 == 0


def play(problems: GymProblems, texts: list[str], finish: str = "stop") -> list[Any]:
    """Attempts at place 0."""
    group = problems.group(0)
    renderer = ChatRenderer(TOKENIZER, NANO)

    async def played() -> list[Any]:
        question = (await group.item())["question"]
        a, b = question.removesuffix("?").split(" + ")
        asked = [{"role": "system", "content": "Only the number."},
                 {"role": "user", "content": question}]  # fmt: skip
        given = renderer.render(asked, None, 0.0).token_ids
        answers: list[list[int]] = []
        for text in texts:
            said = {"role": "assistant", "content": text.replace("OWN", str(int(a) + int(b)))}
            whole = renderer.render([*asked, said], None, 0.0, add_generation_prompt=False)
            answers.append(VOCABULARY.expand(whole.token_ids[len(given) :]))
        sampler = Seeded(*answers, finish=finish)
        found = await play_group(group, sampler, Limits(env_seconds=250), range(len(texts)))
        assert list(sampler.asked[0][0].tokens) == VOCABULARY.expand(given)
        return list(found)

    return asyncio.run(played())


@pytest.mark.usefixtures("library")
def test_attempts_are_played() -> None:
    asked = Gym(families="odd", system="Only the number.", effort=0.0, extract="last_line")
    found = play(GymProblems(asked, PROMPTS), ["OWN", "so:\nOWN\n", "OWN\nno", "raise", ""])
    assert [one.reward for one in found] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [one.status for one in found] == ["over"] * 5
    assert [one.metrics.get("gym/unscored") for one in found] == [0.0, 0.0, 0.0, 1.0, None]
    cut = play(GymProblems(asked, PROMPTS), ["OWN"], finish="length")
    assert [(one.reward, one.status) for one in cut] == [(0.0, "truncated")]


@pytest.mark.usefixtures("library")
def test_an_item_that_cannot_be_made_costs_its_group_alone() -> None:
    group = GymProblems(Gym(families="never"), PROMPTS).group(0)
    assert isinstance(group, GymGroup)
    found = asyncio.run(play_group(group, Scripted(), Limits(env_seconds=250), [1, 2]))
    assert [(one.status, one.reward) for one in found] == [("failed", None)] * 2
    assert "ZeroDivisionError: by nothing" in str(found[0].error)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"families": "ading"}, "no family 'ading'; near it: adding"),
        ({"families": {"adding": 1.0, "sokoban": 1.0}}, "no family 'sokoban'"),
        ({"families": "composite"}, "'composite' is not used: give several families"),
        ({"families": "game_of_life_halting"}, "is not used: its scorer takes any text"),
        ({"families": "adding", "settings": {"adding": {"digit": 3}}}, "no 'digit'; near it: dig"),
        ({"families": "adding", "settings": {"adding": {"digits": 0}}}, "digits must be positive"),
        ({"families": "adding", "settings": {"adding": {"seed": 1}}}, "seed cannot be set"),
    ],
)
def test_families_and_settings_that_there_are_not_are_named(fields: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        GymProblems(Gym(**fields), PROMPTS)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"families": {}}, "families: at least one"),
        ({"families": {"a": 0.0}}, "families: at least one"),
        ({"families": {"a": -1.0}}, r"families\['a'\] = -1.0"),
        ({"families": {"a": float("nan")}}, r"families\['a'\] = nan"),
        ({"families": "a", "split": "test"}, "split = 'test'"),
        ({"families": "a", "extract": "first"}, "extract = 'first'"),
        ({"families": "a", "settings": {"b": {}}}, "b is none of the families"),
        ({"families": "a", "settings": {"a": {"x": {1}}}}, "must be values of JSON"),
        ({"families": "a", "effort": 2.0}, "reasoning effort 2.0"),
    ],
)
def test_a_gym_names_what_is_wrong(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Gym(**fields)


def test_without_the_package_the_line_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'suzuri\[gym\]'"):
        GymProblems(Gym(families="adding"), PROMPTS)


# The real one

FAMILIES = ("chain_sum", "gcd", "spell_backward", "isomorphic_strings", "ransom_note",
            "polynomial_multiplication", "propositional_logic", "gsm_symbolic")  # fmt: skip
"""Some of which depend on the order of sets, score above 1, have no answer of their own, or have
few items."""


@pytest.fixture(scope="module")
def two() -> list[Workers]:
    pytest.importorskip("reasoning_gym")
    return [Workers(count=1), Workers(count=1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_the_real_one(family: str, two: list[Workers]) -> None:
    limits = CallLimits(cpu_seconds=None, wall_seconds=300.0)
    here, there = (
        [
            workers.call_now("suzuri.envs.gym_worker:item", family, "{}", 5, split, limits=limits)
            for split in ("train", "held_out")
        ]
        for workers in two
    )
    assert here == there
    for split, item in zip(("train", "held_out"), here, strict=True):
        assert split_of(item["key"]) == split
        entry = gym_worker.entry_of(family, "{}", 5, item["index"])
        place = (family, json.dumps({}), 5, item["index"])
        if entry["answer"] is not None:
            assert gym_worker.score(*place, str(entry["answer"])) == 1.0
        for wrong in ("", "zzz", " ".join(map(str, range(300)))):
            assert gym_worker.score(*place, wrong) < 1.0
