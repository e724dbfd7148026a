"""Tool loops of agent frameworks, as their users write them, against a model that follows a script.

The script has 30 turns that think and call tools, every third one two at a time, and a last one
that answers. What a loop must bring: every call run once with its arguments, and every thought,
call and result in the history of the last request, in order.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai

from suzuri.processing.tokenizer import (
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_MODEL_END_SAMPLING,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    MESSAGE_MODEL,
)
from suzuri.server.app import create_app
from suzuri.server.text_messages import Render
from tests.server.fakes import FakeEngine, FakeTexts, service

TURNS = 30
ANSWER = "done: ∑ 🙂"


@dataclasses.dataclass
class Done:
    """What a loop did: the tools it ran, its answer, and the messages that it sent last."""

    ran: list[tuple[str, dict[str, Any]]]
    answer: str
    messages: list[dict[str, Any]]
    num_requests: int


def ids(text: str) -> list[int]:
    return list(text.encode())


def block(kind: int, text: str, name: str = "") -> list[int]:
    return [MESSAGE_MODEL, *ids(name), kind, *ids(text), END_MESSAGE]


def calls_of(turn: int) -> list[tuple[str, dict[str, Any]]]:
    note = {"text": f'turn {turn}: "é" \\ <|end_message|> }}', "page": turn}
    add = {"a": turn, "b": turn * 1000}
    return [("note", note), ("add", add)] if turn % 3 == 2 else [("add", add)]


def expected_calls() -> list[tuple[str, dict[str, Any]]]:
    return [call for turn in range(TURNS) for call in calls_of(turn)]


def script() -> list[list[int]]:
    """The ids of every turn."""
    turns: list[list[int]] = []
    for turn in range(TURNS):
        written = block(CONTENT_THINKING, f"thought {turn}")
        if turn % 5 == 4:
            written += block(CONTENT_TEXT, f"text {turn}")
        for name, arguments in calls_of(turn):
            body = json.dumps({"name": name, "args": arguments}, ensure_ascii=False)
            written += block(CONTENT_INVOKE_TOOL_JSON, body, name)
        turns.append([*written, CONTENT_MODEL_END_SAMPLING])
    turns.append([*block(CONTENT_TEXT, ANSWER), CONTENT_MODEL_END_SAMPLING])
    return turns


Ran = Callable[[str, dict[str, Any]], Any]
Loop = Callable[[openai.AsyncOpenAI, Ran, bool], Awaitable[str]]
"""(client, what runs a tool, whether to stream) to the answer."""


def result_of(name: str, arguments: dict[str, Any]) -> Any:
    return arguments["a"] + arguments["b"] if name == "add" else f"noted {arguments['page']}"


def run_loop(loop: Loop, *, stream: bool) -> Done:
    """The loop against a server of its own."""
    engine = FakeEngine(turns=script())
    made = service(engine)
    assert isinstance(made.texts, FakeTexts)
    ran: list[tuple[str, dict[str, Any]]] = []

    def run(name: str, arguments: dict[str, Any]) -> Any:
        ran.append((name, arguments))
        return result_of(name, arguments)

    async def main() -> str:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(made)))
        client = openai.AsyncOpenAI(api_key="x", base_url="http://server/v1", http_client=http)
        async with client:
            return await loop(client, run, stream)

    answer = asyncio.run(main())
    question = made.texts.asked[-1]
    assert isinstance(question, Render)
    return Done(ran, answer, json.loads(question.messages), len(made.texts.asked))


def check(done: Done, *, thoughts: bool) -> None:
    """Nothing is lost. `thoughts`: whether the framework sends them back."""
    assert done.answer == ANSWER
    assert done.num_requests == TURNS + 1
    assert sorted(map(json.dumps, done.ran)) == sorted(map(json.dumps, expected_calls()))
    replies = [item for item in done.messages if item["role"] == "assistant"]
    calls = [call for item in replies for call in item.get("tool_calls") or []]
    # pydantic_ai sends what looks like markup back with a zero-width joiner in it.
    given = [call["function"]["arguments"].replace("<\u200d|", "<|") for call in calls]
    seen = [(c["function"]["name"], json.loads(g)) for c, g in zip(calls, given, strict=True)]
    assert seen == expected_calls()
    results = {i["tool_call_id"]: i["content"] for i in done.messages if i["role"] == "tool"}
    assert len(results) == len({call["id"] for call in calls}) == len(expected_calls())
    for call, (name, arguments) in zip(calls, expected_calls(), strict=True):
        assert text_of(results[call["id"]]) == str(result_of(name, arguments))
    texts = [text_of(item["content"]) for item in replies if item.get("content")]
    assert texts == [f"text {turn}" for turn in range(TURNS) if turn % 5 == 4]
    if thoughts:
        found = [item["reasoning_content"] for item in replies]
        assert found == [f"thought {turn}" for turn in range(TURNS)]


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


# The loops


async def openai_sdk(client: openai.AsyncOpenAI, run: Ran, stream: bool) -> str:
    """The official SDK, with its own messages sent back."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    number = {"type": "integer"}
    shapes = {"add": {"a": number, "b": number}, "note": {"text": {"type": "string"}}}
    tools: Any = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": fields}},
        }
        for name, fields in shapes.items()
    ]
    while True:
        fields: Any = {"model": "fake", "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(**fields) as events:
                choice: Any = (await events.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**fields)).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            assert choice.finish_reason == "stop"
            return choice.message.content
        for call in choice.message.tool_calls:
            result = run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def openai_agents(client: openai.AsyncOpenAI, run: Ran, stream: bool) -> str:
    import agents  # pyright: ignore[reportMissingImports]

    agents.set_tracing_disabled(True)

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(run("add", {"a": a, "b": b}))

    def note(text: str, page: int) -> str:
        """Keeps a text."""
        return str(run("note", {"text": text, "page": page}))

    agent: Any = agents.Agent(
        name="tester",
        model=agents.OpenAIChatCompletionsModel("fake", client),
        tools=[agents.function_tool(add), agents.function_tool(note)],
    )
    if stream:
        result: Any = agents.Runner.run_streamed(agent, "begin", max_turns=TURNS + 2)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, "begin", max_turns=TURNS + 2)
    return result.final_output


async def pydantic_ai(client: openai.AsyncOpenAI, run: Ran, stream: bool) -> str:
    import pydantic_ai  # pyright: ignore[reportMissingImports]
    from pydantic_ai.models.openai import OpenAIChatModel  # pyright: ignore[reportMissingImports]
    from pydantic_ai.providers.openai import (  # pyright: ignore[reportMissingImports]
        OpenAIProvider,
    )

    model: Any = OpenAIChatModel("fake", provider=OpenAIProvider(openai_client=client))
    agent: Any = pydantic_ai.Agent(model)

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(run("add", {"a": a, "b": b}))

    def note(text: str, page: int) -> str:
        """Keeps a text."""
        return str(run("note", {"text": text, "page": page}))

    agent.tool_plain(add)
    agent.tool_plain(note)
    if stream:
        answer = ""
        async with agent.run_stream_events("begin") as events:
            async for event in events:
                if event.event_kind == "agent_run_result":
                    answer = event.result.output
        return answer
    return (await agent.run("begin")).output


LOOPS: dict[str, tuple[Loop, bool]] = {
    "openai": (openai_sdk, True),
    "agents": (openai_agents, False),
    "pydantic_ai": (pydantic_ai, True),
}
"""By the module to import: the loop, and whether it sends thoughts back."""
