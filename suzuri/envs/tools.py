"""Tools that a model may call within an environment. No torch here."""

# pyright: strict

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from suzuri.envs.guard import Fault, guarded
from suzuri.envs.sandbox import SandboxLimits, run_python
from suzuri.envs.task import Message, calls


class Tool(Protocol):
    """`declaration`: in OpenAI's form, {"type": "function", "function": {"name": ...}}."""

    @property
    def declaration(self) -> Message: ...

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """What the model is told. What it raises becomes an error that the model is told."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonTool:
    """Runs code (sandbox.py)."""

    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    name: str = "python"

    @property
    def declaration(self) -> Message:
        about = "a program; what it prints comes back"
        return of_one_text(self.name, "Run Python code.", "code", about)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        return (await run_python(one_text(arguments, "code"), self.limits)).output


def of_one_text(name: str, about: str, argument: str, about_it: str | None = None) -> Message:
    """The declaration of a tool with one argument, a text."""
    text = {"type": "string"} if about_it is None else {"type": "string", "description": about_it}
    parameters = {"type": "object", "properties": {argument: text}, "required": [argument]}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def one_text(arguments: Mapping[str, Any], name: str) -> str:
    """The argument of such a tool. Raises ValueError for anything else."""
    text = arguments.get(name)
    if not isinstance(text, str) or set(arguments) != {name}:
        raise ValueError(f"give {name}, a string, and nothing else")
    return text


class Toolbox:
    """Tools by name. `seconds`: what one call may take before the model is told that it took too
    long."""

    def __init__(self, tools: Sequence[Tool], *, seconds: float = 10.0) -> None:
        self._tools = {tool.declaration["function"]["name"]: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError("two tools of one name")
        self._seconds = seconds
        self.declarations: tuple[Message, ...] = tuple(tool.declaration for tool in tools)

    async def replies(self, message: Message) -> tuple[Message, ...]:
        """The results of the calls of an assistant's message, all run at the same time; empty where
        it calls nothing, or its calls are broken."""
        found = calls(message)
        if found is None:
            return ()
        results = await asyncio.gather(
            *(self._run(name, arguments) for _, name, arguments in found)
        )
        return tuple(
            {"role": "tool", "tool_call_id": str(call.get("id")), "name": name, "content": result}
            for (call, name, _), result in zip(found, results, strict=True)
        )

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return _error(f"no tool {name}; there are {', '.join(self._tools)}")
        try:
            return await guarded(tool.run(arguments), self._seconds)
        except Fault as fault:
            return _error(str(fault))


def _error(text: str) -> str:
    return json.dumps({"error": text})
