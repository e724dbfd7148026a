"""Tools that run: their results, their faults, and a conversation with one."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from suzuri.envs.rollout import Limits, rollout
from suzuri.envs.sandbox import SandboxLimits
from suzuri.envs.task_env import TaskEnv
from suzuri.envs.tools import PythonTool, Toolbox
from suzuri.envs.verifiable import Checkable
from suzuri.processing.chat import ChatRenderer
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted


class Wait:
    """Sleeps, or raises."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self._seconds, self._error = seconds, error

    @property
    def declaration(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return "waited"


def message(*called: tuple[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(called)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def replies(toolbox: Toolbox, *called: tuple[str, Any]) -> list[str]:
    found = asyncio.run(toolbox.replies(message(*called)))
    assert [reply["tool_call_id"] for reply in found] == [f"call_{i}" for i in range(len(called))]
    return [reply["content"] for reply in found]


def test_several_tools_answer_in_the_order_of_the_calls() -> None:
    toolbox = Toolbox([PythonTool(), Wait(0.0)])
    found = replies(toolbox, ("wait", {}), ("python", '{"code": "print(6 * 7)"}'), ("wait", {}))
    assert found == ["waited", "42", "waited"]
    assert asyncio.run(toolbox.replies({"role": "assistant", "content": "no call"})) == ()
    assert asyncio.run(toolbox.replies(message(("python", "{broken")))) == ()


def test_what_goes_wrong_is_told_to_the_model() -> None:
    toolbox = Toolbox([PythonTool(limits=SandboxLimits(seconds=3)), Wait(60)], seconds=4)
    found = replies(toolbox, ("python", {"cod": "1"}), ("fly", {}), ("python", {"code": "1/0"}))
    assert json.loads(found[0]) == {"error": "ValueError: give code, a string, and nothing else"}
    assert json.loads(found[1]) == {"error": "no tool fly; there are python, wait"}
    assert "ZeroDivisionError" in found[2]
    slow = Toolbox([Wait(60)], seconds=0.01)
    assert json.loads(replies(slow, ("wait", {}))[0]) == {"error": "took more than 0.01 s"}
    broken = Toolbox([Wait(0, KeyError("k"))])
    assert json.loads(replies(broken, ("wait", {}))[0]) == {"error": "KeyError: 'k'"}
    with pytest.raises(ValueError, match="two tools of one name"):
        Toolbox([Wait(0), Wait(1)])


def test_a_conversation_with_a_tool_that_runs() -> None:
    question = {"role": "user", "content": "17 * 23?"}
    task = Checkable(messages=(question,), answer=391, grader="number", effort=0.0)
    toolbox = Toolbox([PythonTool()])
    call = message(("python", {"code": "print(17 * 23)"}))
    result = {"role": "tool", "tool_call_id": "call_0", "name": "python", "content": "391"}
    said = {"role": "assistant", "content": "391"}
    renderer = ChatRenderer(TOKENIZER, NANO)
    answers: list[list[int]] = []
    for before, turn in (([question], call), ([question, call, result], said)):
        given = renderer.render(before, toolbox.declarations, 0.0).token_ids
        whole = renderer.render(
            [*before, turn], toolbox.declarations, 0.0, add_generation_prompt=False
        ).token_ids
        answers.append(VOCABULARY.expand(whole[len(given) :]))
    sampler = Scripted(*answers)
    found = asyncio.run(rollout(TaskEnv(task, PROMPTS, toolbox), sampler, Limits(), seed=0))
    assert (found.reward, found.status, found.error) == (1.0, "over", None)
    whole = renderer.render([question, call, result], toolbox.declarations, 0.0).token_ids
    assert list(sampler.asked[1][0].tokens) == VOCABULARY.expand(whole)
