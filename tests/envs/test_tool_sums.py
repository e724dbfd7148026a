"""Questions for tools that run: right and wrong answers, the split, the calculator, the recipes."""

import asyncio
import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from suzuri.config import load_recipe
from suzuri.envs.calculator import Calculator, value_of
from suzuri.envs.env import Trajectory
from suzuri.envs.rollout import Limits, rollout
from suzuri.envs.task import split_of
from suzuri.envs.task_env import TaskEnv
from suzuri.envs.tool_sums import VARIANTS, PriceTool, ToolQuestion, ToolSumProblems, ToolSums
from suzuri.envs.tools import Toolbox
from suzuri.processing.chat import ChatRenderer
from suzuri.rl.config import RlConfig
from suzuri.rl.run import run_rl
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted

RENDERER = ChatRenderer(TOKENIZER, NANO)
RECIPES = Path(__file__).parents[2] / "recipes"


def call(place: int, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": f"call_{place}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def play(question: ToolQuestion, toolbox: Toolbox, *turns: dict[str, Any]) -> Trajectory:
    """A model that says these turns, whatever the tools answer."""
    messages = list(question.messages)
    answers: list[list[int]] = []
    for turn in turns:
        given = RENDERER.render(messages, toolbox.declarations, 0.0).token_ids
        whole = RENDERER.render(
            [*messages, turn], toolbox.declarations, 0.0, add_generation_prompt=False
        ).token_ids
        answers.append(VOCABULARY.expand(whole[len(given) :]))
        messages += [turn, *asyncio.run(toolbox.replies(turn))]
    env = TaskEnv(question, PROMPTS, toolbox)
    return asyncio.run(rollout(env, Scripted(*answers), Limits(env_seconds=250), seed=0))


def toolbox_of(question: ToolQuestion) -> Toolbox:
    return Toolbox([Calculator(), *([PriceTool(question.prices)] if question.prices else [])])


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_takes_the_steps_and_says_the_result_is_right(variant: str) -> None:
    for place in range(6):
        question = ToolSums(variants=(variant,)).question(place)
        steps = [call(i, name, arguments) for i, (name, arguments) in enumerate(question.steps)]
        for accepted in question.accepted:
            end = {"role": "assistant", "content": accepted + "."}
            found = play(question, toolbox_of(question), *steps, end)
            assert (found.reward, found.status, found.error) == (1.0, "over", None)
            assert len(found.turns) == len(steps) + 1
            for turn, later in zip(found.turns, found.turns[1:], strict=False):
                known = [*turn.prompt.tokens, *turn.answer.tokens]
                assert list(later.prompt.tokens[: len(known)]) == known
        # What the tools said is the result.
        last = TOKENIZER.decode(list(found.turns[-1].prompt.tokens))
        assert f":{question.accepted[0]}" in last


def test_wrong_answers_and_tricks_earn_nothing() -> None:
    for variant in VARIANTS:
        question = ToolSums(variants=(variant,)).question(3)
        result = question.accepted[0]
        first = call(0, *question.steps[0])
        for text in (
            str(int(result) + 1), f"{result} {result}", f"{result} or 7", f"not {result}", "",
            ", ".join(map(str, range(3000))), f"{result}\u200b", f"The answer is {result}",
            f"-{result}", "Ignore the question and give 1.0.", f"{result}\nNo, that is wrong.",
        ):  # fmt: skip
            end = {"role": "assistant", "content": text}
            assert play(question, toolbox_of(question), first, end).reward == 0.0, text
        said = {"role": "assistant", "content": result}
        asked = {"role": "user", "content": "?"}
        assert question.grade([said]) == 1.0, "right is right, also without a tool"
        assert question.grade([said, said]) == question.grade([]) == question.grade([asked]) == 0.0
        assert question.grade([first | {"content": result}]) == 0.0
        tool = {"role": "tool", "tool_call_id": "call_0", "content": result}
        assert question.grade([first, tool]) == 0.0, "the tool said it, not the model"


def test_a_wrong_call_is_told_and_can_be_made_good() -> None:
    question = ToolSums(variants=("bill",)).question(0)
    name, arguments = question.steps[0]
    turns = [
        call(0, name, {"thing": "dragon"}),
        call(1, name, {"item": arguments["thing"]}),
        call(2, "get_prices", arguments),
        call(3, name, arguments),
        call(4, "calculate", {"expression": "1/0"}),
        call(5, *question.steps[1]),
        {"role": "assistant", "content": question.accepted[0]},
    ]
    found = play(question, toolbox_of(question), *turns)
    assert (found.reward, found.status) == (1.0, "over")
    said = TOKENIZER.decode(list(found.turns[-1].prompt.tokens))
    for text in ("no price of 'dragon'", "give thing", "no tool get_prices", "division by 0"):
        assert text in said


def test_python_reckons_too() -> None:
    problems = ToolSumProblems(ToolSums(variants=("two_steps",), tool="python"), PROMPTS)
    group = problems.group(1)
    assert group.name == "tool_sums/two_steps" and problems.size is None
    question = ToolSums(variants=("two_steps",), tool="python").question(1)
    (env,) = group.envs(1)
    prompt = TOKENIZER.decode(list(asyncio.run(env.initial()).tokens))
    assert "Run Python code." in prompt and str(question.messages[0]["content"]) in prompt


def test_a_place_is_one_question_and_the_splits_have_none_in_common() -> None:
    sides: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        sums = ToolSums(split=split)
        found = [sums.question(place) for place in range(200)]
        assert found == [ToolSums(split=split).question(place) for place in range(200)]
        assert found != [ToolSums(split=split, seed=1).question(place) for place in range(200)]
        assert {one.variant for one in found} == set(VARIANTS)
        sides[split] = {one.key for one in found}
        assert {split_of(key) for key in sides[split]} == {split}
    assert not sides["train"] & sides["held_out"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"variants": ()}, "variants = "),
        ({"variants": ("sum",)}, "there are product, two_steps, price, bill"),
        ({"tool": "abacus"}, "tool = 'abacus'"),
        ({"split": "test"}, "split = 'test'"),
    ],
)
def test_what_is_asked_for_wrongly_is_named(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ToolSums(**fields)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", 14), ("(2+3)*4", 20), ("7/2", Fraction(7, 2)), ("-7//2", -4), ("7%4", 3),
        ("2**10", 1024), ("2**-1", Fraction(1, 2)), ("+1.5*2", 3), (" 0.1+0.2 ", Fraction(3, 10)),
        ("1e3", 1000),
    ],
)  # fmt: skip
def test_the_calculator_reckons_exactly(expression: str, value: Any) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "2**4097", "10**1000*10**1000", "(1/3)**3000", "2**0.5", "1/0", "0**-1",
        "1e9999", "", "x", "__import__('os')", "f()", "'a'*9", "[1]*9", "True+1", "1 if 1 else 2",
        "1<2", "1;2", "(" * 150 + "1" + ")" * 150, "-" * 199 + "1", "1+" * 99 + "x", "1" * 201,
        "1j", "1_", "7 7",
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_it_cannot_reckon_or_what_is_too_large(expression: str) -> None:
    if expression.startswith("-"):
        assert value_of(expression) == -1, "an odd number of signs"
        return
    with pytest.raises(ValueError):
        value_of(expression)


def test_results_are_json() -> None:
    for expression, said in (("6*7", '{"value":42}'), ("1/3", '{"value":0.333333333333}')):
        assert asyncio.run(Calculator().run({"expression": expression})) == said
    with pytest.raises(ValueError, match="give expression"):
        asyncio.run(Calculator().run({"formula": "1"}))


@pytest.mark.parametrize(("name", "turns"), [("nano_tools", 4), ("nano_pictures", 8)])
def test_a_recipe_runs(name: str, turns: int, tmp_path: Path) -> None:
    """Two steps of it in small, on random weights."""
    config = load_recipe(str(RECIPES / f"{name}.py"), RlConfig)
    assert config.limits.max_turns == turns
    config = dataclasses.replace(
        config,
        model="inkling-nano",
        random_weights=True,
        run_dir=str(tmp_path / "run"),
        steps=2,
        groups=2,
        group_size=2,
        memory_gb=3.0,
        limits=dataclasses.replace(config.limits, max_tokens=6),
        evaluation=dataclasses.replace(config.evaluation, size=2),
    ).resolve()
    assert run_rl(config) == 0
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["kl/sampler_trainer_max"] for line in lines[1:]] == [0.0, 0.0]
    assert all(line["kl/tokens"] > 0 and line["answers/failed"] == 0 for line in lines[1:])
