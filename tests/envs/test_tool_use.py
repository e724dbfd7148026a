"""Tool tasks: arguments that the question has and the schema allows, under the names declared."""

import random
import re
from typing import Any

import pytest

from suzuri.envs.generators import tool_use
from suzuri.envs.generators.tool_catalogue import TOOLS
from suzuri.envs.task import Task, calls, strict_json


def drawn(variant: str, count: int = 80) -> list[Task]:
    return [tool_use.make(random.Random(seed), seed / count, variant) for seed in range(count)]


def declared(task: Task) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}


@pytest.mark.parametrize("variant", ["call", "two_calls", "exchange", "result"])
def test_calls_fit_question_and_schema(variant: str):
    kinds = {"string": str, "integer": int}
    for task in drawn(variant):
        message = task.messages[-2] if variant == "result" else task.target[0]
        made = calls(message)
        assert made is not None and len(made) == (2 if variant == "two_calls" else 1)
        for _, name, arguments in made:
            schema = declared(task)[name]
            assert set(arguments) == set(schema["properties"]) == set(schema["required"])
            for key, value in arguments.items():
                field = schema["properties"][key]
                assert type(value) is kinds[field["type"]]
                assert value in field.get("enum", [value])
                assert str(value) in task.messages[0]["content"]


def test_a_wrong_argument_or_tool_scores_nothing():
    for task in drawn("call", 40):
        call = task.target[0]["tool_calls"][0]
        function = call["function"]
        arguments = function["arguments"]
        key = sorted(arguments)[0]
        others = [name for name in declared(task) if name != function["name"]]
        for changed in (
            {"name": others[0], "arguments": arguments},
            {"name": function["name"], "arguments": {**arguments, key: "nowhere"}},
            {
                "name": function["name"],
                "arguments": {k: arguments[k] for k in arguments if k != key},
            },
            {"name": function["name"], "arguments": {**arguments, "extra": 1}},
        ):
            wrong = {**task.target[0], "tool_calls": [{**call, "function": changed}]}
            assert task.grade(wrong) == 0.0
        assert task.grade({**task.target[0], "tool_calls": [call, call]}) == 0.0


def test_two_to_five_tools_of_different_names():
    counts = {len(declared(task)) for task in drawn("call", 200)}
    assert counts == {2, 3, 4, 5}
    assert all(len(task.tools) == len(declared(task)) for task in drawn("call", 200))


def test_reports_say_what_the_tool_returned():
    failed = 0
    for task in drawn("exchange", 150):
        facts: Any = strict_json(task.target[1]["content"])
        said = task.target[2]["content"]
        for value in facts.values():
            assert value is True or str(value) in said or task.tools[0] is None or "price" in facts
        failed += "error" in facts
        assert tuple(task.reply(task.target[0])) == (task.target[1],)
    assert 3 < failed < 40


def test_no_call_is_right_where_none_is_needed():
    for task in drawn("none", 40):
        assert task.tools and task.target[0].get("tool_calls") is None
        name = next(iter(declared(task)))
        call = {"id": "a", "type": "function", "function": {"name": name, "arguments": {}}}
        assert task.grade({**task.target[0], "tool_calls": [call]}) == 0.0


def test_the_catalogue_is_sound():
    names = [name for tool in TOOLS for name in tool.names]
    assert len(set(names)) == len(names) and len(TOOLS) == 20
    for tool in TOOLS:
        firsts = {argument.names[0] for argument in tool.arguments}
        for request in tool.requests:
            assert set(re.findall(r"\{(\w+)\}", request)) == firsts
        facts = set(tool.facts(random.Random(0)))
        assert set(re.findall(r"\{(\w+)\}", tool.report)) <= firsts | facts
        assert not firsts & facts
