"""Stop strings of chats end the answer's text, and nothing else is searched; streamed as whole."""

import random
from typing import Any

import httpx
import pytest

from suzuri.processing.tokenizer import (
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_MODEL_END_SAMPLING,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    MESSAGE_MODEL,
)
from tests.server.asking import CHAT, chat, ids, run
from tests.server.fakes import FakeEngine, service
from tests.server.test_http import TOOLS, as_joined, events, joined

THOUGHT = [CONTENT_THINKING, *ids("I must say END or Question:"), END_MESSAGE]
CALL = [
    *(MESSAGE_MODEL, *ids("f"), CONTENT_INVOKE_TOOL_JSON),
    *(*ids('{"name":"f","args":{"q":"END"}}'), END_MESSAGE),
]
TEXT = [MESSAGE_MODEL, CONTENT_TEXT, *ids("an ñ EN END more"), END_MESSAGE]
TURN = [*THOUGHT, *CALL, *TEXT, *CALL, CONTENT_MODEL_END_SAMPLING]


def both(ids: list[int], **fields: Any) -> dict[str, Any]:
    """The whole answer's choice, after a look at the streamed one."""

    async def scenario(client: httpx.AsyncClient) -> dict[str, Any]:
        body = chat(return_token_ids=True, **fields)
        whole = await client.post(CHAT, json=body)
        assert whole.status_code == 200, whole.text
        streamed = await client.post(CHAT, json={**body, "stream": True})
        expected = [as_joined(choice) for choice in whole.json()["choices"]]
        assert joined(events(streamed.text)) == expected
        return whole.json()["choices"][0] | {"usage": whole.json()["usage"]}

    return run(service(FakeEngine(ids, finish="stop")), scenario)


def test_only_the_text_of_the_answer_is_searched() -> None:
    """A harness sends what must end an answer with every request; thoughts repeat it."""
    found = both(TURN, tools=TOOLS, stop=["Question:", "END"])
    message = found["message"]
    assert message["reasoning_content"] == "I must say END or Question:"
    assert message["content"] == "an ñ EN "
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"q":"END"}'
    assert found["stop_reason"] == "END"
    assert found["finish_reason"] == "tool_calls"
    end = len(THOUGHT) + len(CALL) + 2 + len(ids("an ñ EN END"))
    assert found["token_ids"] == TURN[:end]
    assert found["usage"]["completion_tokens"] == end


def test_an_answer_without_calls_stops() -> None:
    found = both([*THOUGHT, *TEXT], stop="END")
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", "END")
    found = both([*THOUGHT, *TEXT], stop="END", include_stop_str_in_output=True)
    assert found["message"]["content"] == "an ñ EN END"
    found = both([*THOUGHT, *TEXT, CONTENT_MODEL_END_SAMPLING], stop="absent")
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", None)


def test_calls_that_are_text_are_searched() -> None:
    """tool_choice none, or no tools: what looks like a call is the answer's text."""
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = both([*THOUGHT, *CALL], stop="END", **fields)
        assert found["message"]["content"] == '{"name":"f","args":{"q":"'
        assert "tool_calls" not in found["message"]


def test_stop_ids_show_no_text_of_their_own() -> None:
    for fields in ({}, {"stop": "absent"}):
        found = both([*THOUGHT, *TEXT], stop_token_ids=[ord("m")], **fields)
        # In thoughts, too: an id is no text.
        assert found["message"]["reasoning_content"] == "I "
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", ord("m"))
        shown = both(
            [*THOUGHT, *TEXT],
            stop_token_ids=[ord("m")],
            include_stop_str_in_output=True,
            **fields,
        )
        assert shown["message"]["reasoning_content"] == "I m"
    found = both([*THOUGHT, *TEXT], stop_token_ids=[END_MESSAGE])
    assert found["message"]["reasoning_content"] == "I must say END or Question:"
    assert found["stop_reason"] == END_MESSAGE


@pytest.mark.parametrize("seed", range(40))
def test_streamed_equals_whole_for_random_turns(seed: int) -> None:
    draw = random.Random(seed)
    written: list[int] = []
    for _ in range(draw.randrange(1, 5)):
        kind = draw.choice([CONTENT_THINKING, CONTENT_TEXT, CONTENT_TEXT, CONTENT_INVOKE_TOOL_JSON])
        text = "".join(draw.choice("ab ñ{}") for _ in range(draw.randrange(12)))
        if kind == CONTENT_INVOKE_TOOL_JSON and draw.random() < 0.7:
            text = f'{{"name":"f","args":{{"q":"{text}"}}}}'
        written += [MESSAGE_MODEL, kind, *ids(text), *([END_MESSAGE] * (draw.random() < 0.9))]
    stops = ["".join(draw.choice("ab ñ") for _ in range(draw.randrange(1, 4))) for _ in range(2)]
    fields: dict[str, Any] = {"stop": list(dict.fromkeys(stops)), "n": 2}
    fields["min_tokens"] = draw.choice([0, 0, 6])
    fields["include_stop_str_in_output"] = draw.random() < 0.3
    fields["max_tokens"] = draw.choice([None, 9])
    if draw.random() < 0.6:
        fields["tools"] = TOOLS
    found = both(written, **fields)
    text = found["message"]["content"] or ""
    stop = found["stop_reason"]
    if isinstance(stop, str) and not fields["include_stop_str_in_output"]:
        assert stop in stops
    if stop is None and not fields["min_tokens"] and "\ufffd" not in text:
        blocks = written.count(CONTENT_TEXT) + written.count(CONTENT_INVOKE_TOOL_JSON)
        assert blocks > 1 or not any(one in text for one in stops)
