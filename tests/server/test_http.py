"""The HTTP side on a scripted engine: what is refused and how, and what a turn becomes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stream import EngineUnavailable, RequestRefused
from suzuri.processing.tokenizer import (
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_MODEL_END_SAMPLING,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    MESSAGE_MODEL,
)
from suzuri.server.service import Service
from suzuri.server.streaming import EventStream
from suzuri.server.text_messages import Encode, Render
from tests.server.asking import CHAT, COMPLETIONS, chat, events, ids, post, run
from tests.server.fakes import FakeEngine, FakeTexts, service
from tests.waiting import PATIENCE, until_async

THOUGHT = [CONTENT_THINKING, *ids("hm"), END_MESSAGE]
CALL = [
    *(MESSAGE_MODEL, *ids("f"), CONTENT_INVOKE_TOOL_JSON),
    *(*ids('{"name":"f","args":{"q":"x } <|end_message|>"}}'), END_MESSAGE),
]
TEXT = [MESSAGE_MODEL, CONTENT_TEXT, *ids("añ🙂"), END_MESSAGE]
TURN = [*THOUGHT, *TEXT, *CALL, *TEXT, CONTENT_MODEL_END_SAMPLING]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


# (path, body, words of the message, param)
BAD: list[tuple[str, Any, str, str | None]] = [
    (CHAT, chat(temperature=-1), "from 0 to 100", "temperature"),
    (CHAT, chat(temperature="1"), "valid number", "temperature"),
    (CHAT, chat(top_p=1.5), "from 0 to 1", "top_p"),
    (CHAT, chat(top_k=-2), "from -1", "top_k"),
    (CHAT, chat(min_p=2), "from 0 to 1", "min_p"),
    (CHAT, chat(n=0), "from 1 to 128", "n"),
    (CHAT, chat(n=129), "from 1 to 128", "n"),
    (CHAT, chat(n=True), "valid integer", "n"),
    (CHAT, chat(max_tokens=0), "at least 1", "max_tokens"),
    (CHAT, chat(max_tokens=-1), "at least 1", "max_tokens"),
    (CHAT, chat(max_tokens="5"), "valid integer", "max_tokens"),
    (CHAT, chat(max_tokens=2.5), "valid integer", "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "at least 1", "max_completion_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), "give one", "max_tokens"),
    (CHAT, chat(presence_penalty=3), "from -2 to 2", "presence_penalty"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "from 0 to 20", "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "logprobs = true", "top_logprobs"),
    (CHAT, chat(prompt_logprobs=21), "from 0 to 20", "prompt_logprobs"),
    (CHAT, chat(logit_bias={"-1": 1}), "token id", "logit_bias"),
    (CHAT, chat(logit_bias={"abc": 1}), "token id", "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1000}), "from -100 to 100", "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), "from 0 to", "logit_bias"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', "NaN", None),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"top_p":1e999}', "from 0", "top_p"),
    (CHAT, chat(stop=[""]), "empty", "stop"),
    (CHAT, chat(stop=[1]), "string", "stop"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream = true", "stream_options"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), "no such", "stream_options"),
    (
        CHAT,
        chat(stream=True, stream_options={"continuous_usage_stats": True}),
        "only with include_usage",
        "stream_options",
    ),
    (CHAT, chat(max_tokenz=5), "did you mean max_tokens", "max_tokenz"),
    (CHAT, chat(functions=[]), "send tools", "functions"),
    (CHAT, chat(function_call="auto"), "send tool_choice", "function_call"),
    (CHAT, chat(modalities=["audio"]), "text only", "modalities"),
    (CHAT, chat(audio={}), "text only", "audio"),
    (CHAT, chat(prediction={}), "not supported", "prediction"),
    (CHAT, chat(store=True), "stored", "store"),
    (CHAT, chat(service_tier="flex"), "one tier", "service_tier"),
    (CHAT, chat(web_search_options={}), "web", "web_search_options"),
    (CHAT, chat(verbosity="low"), "shorter", "verbosity"),
    (CHAT, chat(prompt_cache_options={"ttl": "30m"}), "promised", "prompt_cache_options"),
    (CHAT, chat(tool_choice="required"), "", "tool_choice"),
    (CHAT, chat(tools=TOOLS, tool_choice="maybe"), "", "tool_choice"),
    (CHAT, chat(response_format={"type": "xml"}), "json_object", "response_format"),
    (CHAT, chat(response_format={"type": "json_schema"}), "", "response_format"),
    (CHAT, chat(regex="a", grammar="start: /a/"), "only one", "regex"),
    (CHAT, chat(regex="a", ignore_eos=True), "where it is whole", "ignore_eos"),
    (CHAT, chat(metadata={"a": 1}), "string", "metadata"),
    (CHAT, {"messages": []}, "at least 1", "messages"),
    (CHAT, {}, "missing", "messages"),
    (CHAT, {"messages": "hi"}, "list", "messages"),
    (CHAT, b"{", "not JSON", None),
    (CHAT, b'{"messages": [],}', "not JSON", None),
    (CHAT, b"\xff\xfe", "UTF-8", None),
    (CHAT, b"\xef\xbb\xbf{}", "not JSON", None),
    (CHAT, b"[" * 100_000, "deep", None),
    (CHAT, b"[]", "object", None),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "at the end", "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "must be n", "best_of"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "from 0 to 20", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "from 1", "max_tokens"),
    (COMPLETIONS, {"prompt": []}, "empty", "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "", "prompt"),
    (COMPLETIONS, {"prompt": "x", "tools": TOOLS}, "no such", "tools"),
    ("/tokenize", {}, "either", "prompt"),
    ("/detokenize", {"tokens": [-1]}, "no token id", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "words", "param"), BAD)
def test_bad_input_gets_400_with_its_field(
    path: str, body: Any, words: str, param: str | None
) -> None:
    """a03 a04 a05 a06 a14 p21 s09: refused by name, and nothing reaches the engine."""
    engine = FakeEngine()
    response = post(service(engine), path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.added


def test_other_refusals_have_their_status() -> None:
    """s09: unknown model, path, method and content type."""

    async def scenario(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        answers = [
            await client.post(CHAT, json=chat(model="other")),
            await client.get("/v1/models/other"),
            await client.get("/nothing"),
            await client.get(CHAT),
            await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}),
            await client.post(CHAT, content=b"x" * 2001, headers={"content-type": "text/plain"}),
        ]
        return [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]

    found = run(service(FakeEngine()), scenario, max_body=2000)
    assert found == [
        *[(404, "not_found_error")] * 3,
        (405, "invalid_request_error"),
        (415, "invalid_request_error"),
        (413, "invalid_request_error"),
    ]


def test_a_body_is_counted_and_timed_as_it_comes() -> None:
    """s09: no announced length, and a sender that stalls."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 100

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(PATIENCE)
        yield b"}"

    for body, seconds, status in ((long, PATIENCE, 413), (slow, 0.2, 408)):

        async def scenario(client: httpx.AsyncClient, content: Any = body) -> int:
            headers = {"content-type": "application/json"}
            return (await client.post(CHAT, content=content(), headers=headers)).status_code

        found = run(service(FakeEngine()), scenario, max_body=2000, body_seconds=seconds)
        assert found == status


def test_keys() -> None:
    """s12: everything but health wants one of the keys; the schema page too."""

    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/get_model_info"):
            for headers in (
                {},
                {"authorization": "Bearer "},
                {"authorization": "Bearer secret2x"},
                {"authorization": "secret2"},
            ):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401
                assert "secret" not in answer.text
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await client.get(path, headers={"authorization": "Bearer secret2"})
            assert answer.status_code == 200
            assert "secret" not in answer.text
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200

    run(service(FakeEngine(TURN)), scenario, keys=("secret1", "secret2"))


# Turns


def whole(made: Service, body: dict[str, Any]) -> dict[str, Any]:
    response = post(made, CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make, as in a whole answer."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for item in chunk["choices"]:
            start: dict[str, Any] = {"message": {}, "calls": {}, "entries": [], "ids": []}
            choice = made.setdefault(item["index"], start)
            assert "finish_reason" not in choice, "nothing comes after the end"
            message, delta = choice["message"], item["delta"]
            for name in ("role", "content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                known = choice["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                assert ("id" in call) == (known["name"] == "")
                for name, value in call["function"].items():
                    known[name] += value
            choice["entries"] += (item["logprobs"] or {}).get("content", [])
            choice["ids"] += item.get("token_ids", [])
            if item["finish_reason"] is not None:
                choice["finish_reason"] = item["finish_reason"]
    return [made[index] for index in sorted(made)]


def as_joined(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the same form."""
    message = {k: v for k, v in choice["message"].items() if v is not None and k != "tool_calls"}
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return {
        "message": message,
        "calls": dict(enumerate(calls)),
        "entries": (choice["logprobs"] or {}).get("content", []),
        "ids": choice.get("token_ids", []),
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("step", [1, 3, 100])
def test_streamed_turns_equal_whole_ones_wherever_they_end(step: int) -> None:
    """p03 p08 p09 p15: the same blocks, also of a turn that max_tokens cuts, without a marker."""
    engine = FakeEngine(step=step)
    body = chat(tools=TOOLS, n=2)

    async def scenario(client: httpx.AsyncClient) -> None:
        for cut in range(1, len(TURN) + 1):
            engine.ids = TURN[:cut]
            engine.finish = "stop" if cut == len(TURN) else "length"
            answer = (await client.post(CHAT, json=body)).json()
            response = await client.post(CHAT, json={**body, "stream": True})
            assert response.headers["content-type"].startswith("text/event-stream")
            expected = [as_joined(choice) for choice in answer["choices"]]
            assert joined(events(response.text)) == expected
            # The one that is there is text, within the arguments of the call.
            assert "<|" not in response.text.replace("<|end_message|>", "")
            reasons = {choice["finish_reason"] for choice in answer["choices"]}
            assert reasons == ({"tool_calls"} if engine.finish == "stop" else {"length"})

    run(service(engine), scenario)


def test_a_turn_has_its_parts() -> None:
    answer = whole(service(FakeEngine(TURN)), chat(tools=TOOLS))
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "añ🙂" * 2
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"q": "x } <|end_message|>"}
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(TURN)
    assert usage["prompt_tokens"] == 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2


def test_usage_comes_once_when_asked_for() -> None:
    """a06"""
    for options in (None, {}, {"include_usage": False}):
        body = chat(stream=True, stream_options=options)
        chunks = events(post(service(FakeEngine(TURN)), CHAT, body).text)
        assert not any("usage" in chunk for chunk in chunks)
    body = chat(stream=True, stream_options={"include_usage": True})
    chunks = events(post(service(FakeEngine(TURN)), CHAT, body).text)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(TURN)


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True, "prompt_logprobs": 1}])
@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_counts_when_asked_to(n: int, more: dict[str, Any]) -> None:
    """As vLLM's: the prompt's tokens, and those that this choice has so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"stream": True, "stream_options": options, "n": n, **more}
    asked = [(CHAT, chat(**fields)), (COMPLETIONS, {"prompt": "hi", "max_tokens": 99, **fields})]
    for path, body in asked:
        *chunks, last = events(post(service(FakeEngine(TURN)), path, body).text)
        seen: dict[int, list[int]] = {index: [] for index in range(n)}
        for chunk in chunks:
            usage, (choice,) = chunk["usage"], chunk["choices"]
            assert usage["prompt_tokens"] == len(ids("hi"))
            assert usage["total_tokens"] == len(ids("hi")) + usage["completion_tokens"]
            seen[choice["index"]].append(usage["completion_tokens"])
        for counts in seen.values():
            assert counts == sorted(counts)
            assert len(set(counts)) > 5
            assert counts[-1] == len(TURN)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == n * len(TURN)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_chunks_of_texts_alone_are_those_that_have_more(usage: dict[str, Any] | None) -> None:
    """They are made in a shorter way."""
    fields: dict[str, Any] = {"stream": True, "stream_options": usage, "n": 2, "max_tokens": 99}
    asked = {"prompt": ["hi", "ho"], **fields}
    plain = events(post(service(FakeEngine(TURN)), COMPLETIONS, asked).text)
    more = {**asked, "return_token_ids": True}
    longer = events(post(service(FakeEngine(TURN)), COMPLETIONS, more).text)

    def shown(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        """Of each sample, without what was asked for beyond texts."""
        found: dict[int, list[dict[str, Any]]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                kept = {k: v for k, v in choice.items() if not k.endswith("token_ids")}
                if kept["text"] or kept["finish_reason"]:
                    rest = {k: v for k, v in chunk.items() if k not in ("id", "created", "choices")}
                    found.setdefault(choice["index"], []).append({**rest, **kept})
        return found

    assert shown(plain) == shown(longer)
    assert len(shown(plain)[3]) > 5
    if usage is not None:
        assert plain[-1]["usage"] == longer[-1]["usage"]


def test_tool_choice_none_makes_calls_impossible() -> None:
    """p12: they are masked, and the history keeps its declarations."""
    engine = FakeEngine(TEXT)
    made = service(engine)
    whole(made, chat(tools=TOOLS, tool_choice="none", logit_bias={"5": 1}))
    _, params, _ = engine.added[0]
    assert params.logit_bias == {5: 1.0, 200049: -100.0, 200057: -100.0}
    assert isinstance(made.texts, FakeTexts)
    question = made.texts.asked[0]
    assert isinstance(question, Render)
    assert json.loads(question.tools) == TOOLS


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine(TEXT)
    fields: dict[str, Any] = {
        **{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        **{"ignore_eos": True, "min_tokens": 2, "stop": ["x"], "logit_bias": {"9": -3}},
    }
    extra = {"max_completion_tokens": 11, "priority": 4, "cache_salt": "s", "user": "u"}
    whole(service(engine), chat(**fields, **extra, logprobs=True, top_logprobs=3))
    _, params, given = engine.added[0]
    for name, value in fields.items():
        expected = {9: -3.0} if name == "logit_bias" else ("x",) if name == "stop" else value
        assert getattr(params, name) == expected
    assert (params.max_tokens, params.logprobs, params.detokenize) == (11, 3, True)
    assert (given["priority"], given["salt"]) == (4, "s")
    whole(service(engine), chat())
    assert engine.added[1][1].max_tokens is None


# What goes wrong on the way


def test_too_many_get_429_and_all_is_let_go() -> None:
    engine = FakeEngine()
    engine.holds = True
    made = service(engine, most_pending=3)

    async def scenario(client: httpx.AsyncClient) -> None:
        waiting = asyncio.create_task(client.post(CHAT, json=chat(n=3)))
        await until_async(lambda: engine.streams)
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
        engine.streams[0].fail(EngineUnavailable("the engine's process ended (signal 9)"))
        answer = await waiting
        assert answer.status_code == 503
        assert "signal 9" in answer.json()["error"]["message"]

    run(made, scenario)


def test_an_engine_that_dies_within_a_stream_is_told() -> None:
    engine = FakeEngine()
    engine.holds = True

    async def scenario(client: httpx.AsyncClient) -> None:
        waiting = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await until_async(lambda: engine.streams)
        engine.streams[0].fail(EngineUnavailable("the engine's process ended (signal 9)"))
        *_, error = events((await waiting).text)
        assert error["error"]["code"] == "unavailable"
        engine.ready, engine.why_not_ready = None, "the engine is restarting"
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200

    run(service(engine), scenario)


def test_what_the_engine_refuses_is_400_also_for_a_stream() -> None:
    class Refusing(FakeEngine):
        def add(self, *args: Any, **fields: Any) -> Any:
            self.holds = True
            stream = super().add(*args, **fields)
            stream.accepted = None
            stream.fail(RequestRefused("prompt (9 tokens) and max_tokens = 9 are more than 16"))
            return stream

    for stream in (False, True):
        response = post(service(Refusing()), CHAT, chat(stream=stream))
        assert response.status_code == 400
        assert "max_tokens = 9" in response.json()["error"]["message"]


def test_the_deadline_is_504() -> None:
    response = post(service(FakeEngine(TEXT, finish="deadline")), CHAT, chat())
    assert response.status_code == 504
    made = service(FakeEngine(TEXT, finish="deadline"), request_seconds=7)
    *_, error = events(post(made, CHAT, chat(stream=True)).text)
    assert "7 s" in error["error"]["message"]


def test_a_faulty_row_is_500_and_no_answer() -> None:
    response = post(service(FakeEngine(TEXT, finish="error")), COMPLETIONS, {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    """s11: what it was owed is let go, and nothing more is written for it."""

    async def main() -> None:
        engine = FakeEngine()
        engine.holds = True
        made = service(engine, reader_seconds=0.2)
        work = made.admit("x", 1)
        work.add([1], SamplingParams())
        sent: list[Any] = []

        async def chunks() -> AsyncGenerator[bytes]:
            for _ in range(100):
                yield b"data: {}"

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        await asyncio.wait_for(
            EventStream(work, chunks())({"type": "http"}, receive, send), PATIENCE
        )
        assert len(sent) == 4
        assert made.num_pending == 0
        assert engine.aborted == [0]

    asyncio.run(main())


def test_draining_refuses_the_new() -> None:
    """s05"""
    made = service(FakeEngine(TEXT))
    made.is_draining = True
    response = post(made, CHAT, chat())
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]


def test_a_drain_tells_those_whose_text_is_still_read() -> None:
    """s05: they have no tokens yet, and nobody would give them any."""
    engine = FakeEngine(TEXT)
    made = service(engine)
    assert isinstance(made.texts, FakeTexts)
    texts = made.texts
    texts.may_answer.clear()

    async def scenario(client: httpx.AsyncClient) -> None:
        waiting = [
            asyncio.create_task(client.post(CHAT, json=chat(stream=stream)))
            for stream in (True, False)
        ]
        await until_async(lambda: len(texts.asked) == 2)
        for work in list(made.works):
            work.tell(EngineUnavailable("the server is shutting down"))
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 503
            assert "shutting down" in answer.json()["error"]["message"]
        assert not engine.added

    run(made, scenario)


def test_prompts_of_completions() -> None:
    """Each form of a prompt; several prompts with several samples in order."""
    engine = FakeEngine(ids("z"), finish="length")
    made = service(engine)
    for prompt, expected in (
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        engine.added.clear()
        answer = post(made, COMPLETIONS, {"prompt": prompt, "n": 2}).json()
        assert [added[0] for added in engine.added] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["completion_tokens"] == 2 * len(expected)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_tokens_and_text() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/tokenize", json={"prompt": "añ", "return_token_strs": True})
        assert answer.json()["tokens"] == ids("añ")
        assert answer.json()["count"] == 3
        answer = await client.post("/detokenize", json={"tokens": ids("añ")})
        assert answer.json() == {"prompt": "añ"}

    made = service(FakeEngine())
    run(made, scenario)
    assert isinstance(made.texts, FakeTexts)
    assert made.texts.asked == [Encode(["añ"])]
