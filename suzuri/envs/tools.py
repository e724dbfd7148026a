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
        code = {"type": "string", "description": "a program; what it prints comes back"}
        function = {
            "name": self.name,
            "description": "Run Python code.",
            "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        }
        return {"type": "function", "function": function}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ValueError("give code, a string, and nothing else")
        return (await run_python(code, self.limits)).output


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
