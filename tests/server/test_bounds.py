"""Small requests that ask for much: what is refused, and that others are answered meanwhile."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from suzuri.engine.messages import Logprobs
from suzuri.engine.stream import RequestRefused
from suzuri.processing.chat_blocks import to_blocks, tool_block
from suzuri.processing.tokenizer import CONTENT_MODEL_END_SAMPLING, CONTENT_TEXT, END_MESSAGE
from suzuri.server import logprobs as made_logprobs
from suzuri.server.config import ServeConfig
from suzuri.server.logprobs import MOST_ENTRIES, MOST_TOKENS, prompt_entries
from tests.server.asking import CHAT, COMPLETIONS, chat, events, ids, post, run
from tests.server.fakes import FakeEngine, logprobs, service

TURN = [CONTENT_TEXT, *ids("x"), END_MESSAGE, CONTENT_MODEL_END_SAMPLING]


# (path, body, words of the message, param): just above what is taken
TOO_MUCH: list[tuple[str, Any, str, str]] = [
    (
        COMPLETIONS,
        {"prompt": [97] * 4000, "n": 128, "prompt_logprobs": 20},
        "10752000",
        "prompt_lo",
    ),
    (
        COMPLETIONS,
        {"prompt": [97] * 4000, "n": 128, "echo": True, "logprobs": 20, "stream": True},
        f"at most {MOST_ENTRIES}",
        "logprobs",
    ),
    (
        COMPLETIONS,
        {"prompt": [97] * 4097, "n": 128, "prompt_logprobs": 0},
        "log-probs",
        "prompt_lo",
    ),
    (
        COMPLETIONS,
        {"prompt": [[97] * 2049] * 2, "n": 64, "prompt_logprobs": 0, "echo": True, "logprobs": 0},
        "prompt_logprobs and logprobs",
        "prompt_lo",
    ),
    (
        COMPLETIONS,
        {"prompt": [97] * 16_385, "n": 128, "echo": True},
        f"at most {MOST_TOKENS}",
        "echo",
    ),
    (
        COMPLETIONS,
        {"prompt": [97] * 16_385, "n": 128, "return_token_ids": True},
        f"at most {MOST_TOKENS}",
        "return_token_ids",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 25_000}], "prompt_logprobs": 20},
        "several requests",
        "prompt_lo",
    ),
    (COMPLETIONS, {"prompt": ["a"] * 10, "n": 128}, "1280 answers", "n"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a" * 5000]}, "4096 characters", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [str(i) for i in range(257)]}, "256 strings", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": list(range(5000))}, "4096", "stop_token_ids"),
    (CHAT, chat(tools=[{}] * 4097), "at most 4096", "tools"),
]


@pytest.mark.parametrize(("path", "body", "words", "param"), TOO_MUCH)
def test_what_a_small_request_may_ask_for_is_bounded(
    path: str, body: Any, words: str, param: str
) -> None:
    made = service(FakeEngine(TURN))
    answer = post(made, path, body)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith(param)


def test_what_just_fits_is_answered() -> None:
    body = {"prompt": [97] * 4096, "n": 128, "echo": True}
    answer = post(service(FakeEngine(ids("x"))), COMPLETIONS, body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["a" * 4096 + "x"] * 128


def test_long_parts_are_made_in_slices_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer however it is cut, streamed and whole, also within a character."""
    body = {"prompt": "aé🙂b" * 3, "n": 3, "echo": True, "logprobs": 2, "prompt_logprobs": 1}

    async def scenario(client: httpx.AsyncClient) -> tuple[Any, Any]:
        whole = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        streamed = events((await client.post(COMPLETIONS, json={**body, "stream": True})).text)
        parts = [
            [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == i]
            for i in range(3)
        ]
        return whole, [part[0] for part in parts]

    found: list[tuple[Any, Any]] = []
    for size in (2**14, 1, 11):
        monkeypatch.setattr(made_logprobs, "_SLICE", size)
        found.append(run(service(FakeEngine(ids("xñ!"))), scenario))
    assert found[0] == found[1] == found[2]
    whole, first = found[0]
    for choice, part in zip(whole, first, strict=True):
        count = len(part["logprobs"]["tokens"])
        assert count == len(ids(body["prompt"]))
        assert {k: v[:count] for k, v in choice["logprobs"].items()} == part["logprobs"]
        assert choice["prompt_logprobs"] == part["prompt_logprobs"]


def test_others_are_answered_while_a_long_part_is_made() -> None:
    """The loop comes round for each slice."""
    prompt = [97] * 20_000
    known: list[Logprobs] = [logprobs(97, 3)] * (len(prompt) - 1)

    async def main() -> int:
        rounds = 0

        async def other() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        made = await prompt_entries(service(FakeEngine()), prompt, known, 20)
        task.cancel()
        assert len(msgspec.json.decode(msgspec.json.encode(made))) == len(prompt)
        return rounds

    assert asyncio.run(main()) >= 20


class CountedName(str):
    """A name that counts how often any of them is looked at."""

    looked = 0

    def __hash__(self) -> int:
        CountedName.looked += 1
        return super().__hash__()


def test_many_tools_are_looked_at_once_each() -> None:
    names = [CountedName(f"f{i}") for i in range(2000)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    block = tool_block(tools)
    assert block is not None
    assert [name for name, _, _ in block.tools] == names
    assert CountedName.looked <= 4 * len(names)
    with pytest.raises(ValueError, match=r"tools\[2000\].*'f7' is declared twice"):
        tool_block([*tools, tools[7]])


def test_no_event_is_cut_by_what_some_readers_take_for_a_line_end() -> None:
    text = "a\u2028b\u2029c\x85d\u00e9"
    turn = [CONTENT_TEXT, *ids(text), END_MESSAGE, CONTENT_MODEL_END_SAMPLING]

    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json=chat(stream=True))
        shown = [item["choices"][0]["delta"].get("content", "") for item in events(answer.text)]
        assert "".join(shown) == text
        assert not any(sign in answer.text for sign in "\u2028\u2029\x85")
        assert "\u00e9" in answer.text

    run(service(FakeEngine(turn)), scenario)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("the prompt is empty; give at least one token", "prompt"),
        ("the prompt has 5000 tokens; with at least one token of answer at most 9 fit", "prompt"),
        ("prompt (5 tokens) and max_tokens = 9 are more than max_context = 10", "max_tokens"),
        ("reasoning effort 'x': must be one of none", "reasoning_effort"),
        ("the conversation has 5000 tokens; at most 9 fit", "messages"),
    ],
)
def test_what_the_engine_refuses_names_the_field(message: str, param: str) -> None:
    class Refusing(FakeEngine):
        def add(self, *args: Any, **fields: Any) -> Any:
            raise RequestRefused(message)

    error = post(service(Refusing()), CHAT, chat()).json()["error"]
    assert (error["message"], error["param"]) == (message, param)


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"prompt": 5}, "prompt: "),
        ({"prompt": [1, "a"]}, "prompt.1: input should be a valid integer"),
        ({"prompt": ["a", 1]}, "prompt.1: input should be a valid string"),
        ({"prompt": [[1], ["x"]]}, "prompt.1.0: input should be a valid integer"),
        ({"prompt": "x", "stop": [1]}, "stop.0: input should be a valid string"),
    ],
)
def test_a_field_of_several_forms_is_named_as_it_is(fields: dict[str, Any], begin: str) -> None:
    message = post(service(FakeEngine()), COMPLETIONS, fields).json()["error"]["message"]
    assert message.startswith(begin)


def test_a_number_too_long_for_python_is_told_in_words() -> None:
    digits = "1" * 6000
    call = {"id": "a", "function": {"name": "f", "arguments": f'{{"a": {digits}}}'}}
    with pytest.raises(ValueError, match="a number has more than 4300 digits") as found:
        to_blocks([{"role": "assistant", "content": None, "tool_calls": [call]}], None)
    assert "set_int_max" not in str(found.value)
    body = json.dumps(chat()).replace("{", f'{{"seed": {digits}, ', 1).encode()
    message = post(service(FakeEngine()), CHAT, body).json()["error"]["message"]
    assert message == "the body is not JSON: a number has more than 4300 digits"


def test_head_is_answered_where_get_is() -> None:
    async def scenario(client: httpx.AsyncClient) -> list[int]:
        paths = ("/health", "/health/live", "/health/ready", "/v1/models", "/metrics", CHAT)
        return [(await client.head(path)).status_code for path in paths]

    assert run(service(FakeEngine()), scenario) == [200] * 5 + [405]


def test_key_files_have_comments_and_their_own_errors(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the tests\n\n  one  \n #two\nthree#3\n")
    assert ServeConfig(api_key_file=str(path), api_key=("four",)).keys() == (
        *("four", "one", "three#3"),
    )
    for data, words in (
        ("ok\nschl\u00fcssel\n".encode(), f"--api-key-file {path}: line 2 is not ASCII"),
        (b"ok\n\xff\n", f"--api-key-file {path}: line 2 is not ASCII"),
        (b"# one\n", f"--api-key-file {path}: there is no key"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError) as found:
            ServeConfig(api_key_file=str(path)).keys()
        assert words in str(found.value)
        assert "schl" not in str(found.value)
    with pytest.raises(ValueError, match="--api-key: a key must be ASCII"):
        ServeConfig(api_key=("schl\u00fcssel",)).keys()
