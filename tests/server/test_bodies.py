"""What a body can be, whoever wrote it: refused by name or answered, in bounded time, never 500."""

import asyncio
import gc
import json
from typing import Any

import httpx
import pytest

from suzuri.server.app import create_app
from suzuri.server.bodies import MOST_OBJECTS
from suzuri.server.limits import Limits
from tests.server.asking import CHAT, COMPLETIONS, chat, ids, post, run
from tests.server.fakes import FakeEngine, FakeTexts, service
from tests.waiting import until_async

HUGE = "9" * 400
LONGER = "9" * 5000
"""More digits than Python makes a number of."""


def raw(fields: str) -> bytes:
    return f'{{"messages":[{{"role":"user","content":"x"}}],{fields}}}'.encode()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


FIELDS: list[tuple[bytes, str]] = [
    (raw('"n":1,"n":2'), "'n' stands twice"),
    (raw('"response_format":{"type":"text","type":"text"}'), "'type' stands twice"),
    (raw('"tools":[{"a":{"b":1,"c":2,"b":1}}]'), "'b' stands twice"),
    (raw('"temperature":Infinity'), "Infinity"),
    (raw('"top_p":-Infinity'), "-Infinity"),
    (raw('"min_p":NaN'), "NaN"),
    (raw('"logit_bias":{"5":NaN}'), "NaN"),
    (raw('"logit_bias":{"5":1e999}'), "from -100 to 100"),
    (raw('"temperature":1e999'), "from 0 to 100"),
    *(
        (raw(f'"{name}":{HUGE}'), name)
        for name in ("n", "max_tokens", "seed", "top_k", "min_tokens")
    ),
    *((raw(f'"{name}":{HUGE}'), name) for name in ("temperature", "top_p", "presence_penalty")),
    *((raw(f'"{name}":-{HUGE}'), name) for name in ("frequency_penalty", "reasoning_effort")),
    (raw(f'"priority":{HUGE}'), "priority"),
    (raw(f'"logit_bias":{{"5":{HUGE}}}'), "logit_bias"),
    (raw(f'"stop_token_ids":[{HUGE}]'), "stop_token_ids"),
    (raw(f'"n":{LONGER}'), "not JSON"),
    (raw('"model":"\\ud800"'), "there is no model"),
    (raw('"\\udfff":1'), "a key"),
    (raw('"n":"\\ud800"'), "valid integer"),
    (raw('"tool_choice":"\\ud800"'), "tool_choice"),
    (raw('"response_format":{"type":"\\ud800"}'), "response_format"),
    (raw('"regex":"\\ud800"'), ""),
    (raw('"choice":["\\ud800"]'), ""),
    (raw('"stop":"\\ud800","cache_salt":"\\ud800"'), ""),
    (raw('"x":' + "[" * 900 + "1" + "]" * 900), "no such parameter"),
    (raw('"tools":' + "[" * 900 + "1" + "]" * 900), "tools"),
    (raw('"response_format":' + '{"a":' * 900 + "1" + "}" * 900), "response_format"),
    (raw('"metadata":' + '{"a":' * 900 + "1" + "}" * 900), "metadata"),
    (nested(10_000), "deep"),
    (b'{"a":' * 100_000, "deep"),
    (b"\xef\xbb\xbf" + raw('"n":1'), "not JSON"),
    (raw('"n":1').decode().encode("utf-16"), "UTF-8"),
    (raw('"user":"') + b"\xed\xa0\x80", "UTF-8"),
    (raw('"n":1') + b"{}", "not JSON"),
    (raw('"n":1').replace(b'"', b"'"), "not JSON"),
    (raw('"n":0x1'), "not JSON"),
    (raw('"n":01'), "not JSON"),
    (raw('"user":"a\nb"'), "not JSON"),
    (b"", "not JSON"),
    (b"null", "object"),
    (b'"text"', "object"),
    (raw(",".join(f'"x{number}":1' for number in range(300))), "301 fields"),
]


@pytest.mark.parametrize(("body", "words"), FIELDS)
def test_hostile_json_is_refused_with_words(body: bytes, words: str) -> None:
    """s09 a14: numbers that are none, halves of characters, depth, keys that stand twice."""
    engine = FakeEngine()
    response = post(service(engine), CHAT, body)
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert len(response.content) < 4000
    assert not engine.added


@pytest.mark.parametrize(
    "body",
    [
        raw('"' + "x" * 5_000_000 + '":1'),
        raw('"model":"' + "x" * 5_000_000 + '"'),
        raw('"stop":[' + '"a",1,' * 400_000 + "1]"),
        raw('"stop_token_ids":[' + '"a",' * 900_000 + "1]"),
        raw('"logit_bias":{' + ",".join(f'"{i}":"a"' for i in range(200_000)) + "}"),
        raw('"metadata":{' + ",".join(f'"{i}":1' for i in range(200_000)) + "}"),
        b'{"messages":[' + b"1," * 900_000 + b"1]}",
        b'{"messages":[' + b"[]," * 1_500_000 + b"1]}",
        b'{"messages":[' + b"{}," * 900_000 + b"{}]}",
    ],
)
def test_many_faults_are_one(body: bytes) -> None:
    """s09: a megabyte of wrong values costs what its JSON costs, and its error is short."""
    response = post(service(FakeEngine()), CHAT, body)
    assert response.status_code in (400, 404, 413)
    assert len(response.content) < 4000


def test_objects_are_counted_and_signs_in_texts_are_not() -> None:
    made = service(FakeEngine([120], finish="length"))
    answer = post(made, CHAT, b'{"messages":[' + b"{}," * MOST_OBJECTS + b"{}]}")
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == f"the body has more than {MOST_OBJECTS} objects"
    assert post(made, COMPLETIONS, {"prompt": "{}" * (MOST_OBJECTS + 1)}).status_code == 200


def test_long_lists_are_read_without_collections() -> None:
    """Each would go through all of them."""
    made = service(FakeEngine([120], finish="length"))
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    def while_read(count: int) -> int:
        body = b'{"prompt":[' + b"[1]," * count + b"[1]]}"
        seen.clear()
        assert post(made, COMPLETIONS, body).status_code == 400
        assert gc.isenabled()
        return seen.count("start")

    gc.callbacks.append(note)
    try:
        few, many = while_read(200), while_read(200_000)
    finally:
        gc.callbacks.remove(note)
    assert many - few < 200_000 / gc.get_threshold()[0] / 10


def test_prompts_of_wrong_items_are_one_fault() -> None:
    for items in ('"a",1,', '1,"a",', '[1,"a"],', '[1],"a",', "[[1]],"):
        body = f'{{"prompt":[{items * 300_000}1]}}'.encode()
        response = post(service(FakeEngine()), COMPLETIONS, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert len(response.content) < 4000
    tokens = b'{"tokens":[' + b'"a",' * 900_000 + b"1]}"
    assert post(service(FakeEngine()), "/detokenize", tokens).status_code == 400


def test_encodings_other_than_none_are_415() -> None:
    async def scenario(client: httpx.AsyncClient) -> list[int]:
        return [
            (
                await client.post(
                    CHAT,
                    content=json.dumps(chat()),
                    headers={"content-type": kind, "content-encoding": encoding},
                )
            ).status_code
            for kind, encoding in (
                ("application/json", "gzip"),
                ("application/x-www-form-urlencoded", "identity"),
                ("multipart/form-data; boundary=x", ""),
                ("application/json; charset=utf-8", "identity"),
            )
        ]

    assert run(service(FakeEngine(ids("x"))), scenario) == [415, 415, 415, 200]


def test_every_error_is_an_object_of_openai() -> None:
    """s09: paths, methods, types, sizes and faults of the server's own."""

    class Faulty(FakeEngine):
        def add(self, *args: Any, **fields: Any) -> Any:
            raise RuntimeError("secret detail")

    async def scenario(client: httpx.AsyncClient) -> None:
        asked = [
            (await client.get("/"), 404),
            (await client.get("/v1/models/a/b%00c"), 404),
            (await client.delete("/v1/models"), 405),
            (await client.put(CHAT), 405),
            (await client.head(CHAT), 405),
            (await client.post(CHAT, content=b"x" * 5000), 413),
            (await client.post(CHAT, content=b"{}", headers={"content-type": "text/xml"}), 415),
            (await client.post(CHAT, json={}), 400),
            (await client.post(CHAT, json=chat()), 500),
        ]
        for response, status in asked:
            assert response.status_code == status, response.text
            assert response.headers["content-type"] == "application/json"
            if response.request.method == "HEAD":
                continue
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert "secret" not in response.text
            assert error["type"] == ("server_error" if status == 500 else error["type"])
        assert asked[3][0].headers["allow"] == "POST"

    run(service(Faulty()), scenario, max_body=4000)


def test_bodies_together_are_bounded() -> None:
    """s09 s11: what has been sent and not been answered, whole or in part, cannot fill memory."""

    async def main() -> None:
        app = create_app(service(FakeEngine()), max_body=1000)
        statuses: list[int] = []
        waiting = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def sender(size: int) -> None:
            parts = iter([size, None])

            async def receive() -> Any:
                size = next(parts)
                if size is None:
                    await waiting.wait()
                    return {"type": "http.disconnect"}
                return {"type": "http.request", "body": b" " * size, "more_body": True}

            scope: dict[str, Any] = {"type": "http", "method": "POST", "path": CHAT}
            scope |= {"headers": [], "query_string": b"", "root_path": "", "raw_path": b""}
            await app(scope, receive, send)

        def bytes_held() -> int:
            limits: Any = app.middleware_stack
            while limits is not None and not isinstance(limits, Limits):
                limits = limits.app
            return 0 if limits is None else limits.held

        held = [asyncio.create_task(sender(1000)) for _ in range(8)]
        await until_async(lambda: bytes_held() == 8000)
        assert statuses == []
        await sender(1000)
        assert statuses == [429]
        waiting.set()
        await asyncio.gather(*held)
        assert bytes_held() == 0

    asyncio.run(main())


def test_texts_that_are_read_are_bounded_too() -> None:
    """s11: /tokenize is no way round the queue's limit."""

    made = service(FakeEngine(), most_pending=3)
    texts = made.texts
    assert isinstance(texts, FakeTexts)

    async def scenario(client: httpx.AsyncClient) -> None:
        texts.may_answer.clear()
        sent = [client.post("/tokenize", json={"prompt": "x"}) for _ in range(5)]
        tasks = [asyncio.create_task(one) for one in sent]
        await until_async(lambda: len(texts.asked) + sum(task.done() for task in tasks) >= 5)
        texts.may_answer.set()
        found = [answer.status_code for answer in await asyncio.gather(*tasks)]
        assert sorted(found) == [200, 200, 200, 429, 429]
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200

    run(made, scenario)
