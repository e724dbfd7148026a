"""The header x-request-id: the client's own or a new one, on every answer, whatever its status."""

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest

from suzuri import __version__
from suzuri.server.app import create_app
from tests.server.asking import CHAT, USER, chat, post, run
from tests.server.fakes import FakeEngine, service

TURN = [200004, 104, 105, 200010, 200006]


async def _asked(client: httpx.AsyncClient, headers: list[tuple[bytes, bytes]]) -> str:
    answer = await client.post(CHAT, json=chat(), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


@pytest.mark.parametrize("mine", [b"a", b"run-7/turn:3", b"x" * 128])
def test_a_client_may_choose_it(mine: bytes) -> None:
    made = service(FakeEngine(TURN))
    assert run(made, lambda client: _asked(client, [(b"X-Request-Id", mine)])) == mine.decode()


@pytest.mark.parametrize("wrong", [b"", b"x" * 129, b"a b", b"\xc3\xa9", b"a\tb"])
def test_another_id_is_made_for_one_that_is_none(wrong: bytes) -> None:
    async def scenario(client: httpx.AsyncClient) -> list[str]:
        return [await _asked(client, [(b"X-Request-Id", wrong)]) for _ in range(2)]

    first, second = run(service(FakeEngine(TURN)), scenario)
    assert first != second
    assert all(len(id) == 32 and id.isalnum() for id in (first, second))


def test_refusals_and_faults_have_it_too(caplog: pytest.LogCaptureFixture) -> None:
    made = service(FakeEngine(TURN))
    made.ready = lambda: 1 // 0  # type: ignore[method-assign]

    async def scenario(client: httpx.AsyncClient) -> None:
        key = {"authorization": "Bearer k"}
        for path, headers, status in (
            ("/get_model_info", {"x-request-id": "the-401"}, 401),
            ("/nowhere", {"x-request-id": "the-404", **key}, 404),
            ("/v1/models/other", {"x-request-id": "the-other-404", **key}, 404),
            ("/get_model_info", {"x-request-id": "the-500", **key}, 500),
        ):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == status
            assert answer.headers.get_list("x-request-id") == [headers["x-request-id"]]

    with caplog.at_level(logging.ERROR, "suzuri.server.app"):
        run(made, scenario, keys=("k",))
    assert [r.getMessage() for r in caplog.records if r.name == "suzuri.server.app"] == [
        "request the-500 failed, GET /get_model_info:"
    ]


def test_the_official_sdk_finds_it() -> None:
    made = service(FakeEngine(TURN))
    sent: list[str] = []

    async def noted(answer: httpx.Response) -> None:
        sent.append(answer.headers["x-request-id"])

    async def main() -> list[str | None]:
        transport = httpx.ASGITransport(app=create_app(made))
        http: Any = httpx.AsyncClient(transport=transport, event_hooks={"response": [noted]})
        fields: Any = {"model": "fake", "messages": USER}
        async with openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", http_client=http, max_retries=0
        ) as sdk:
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(**fields, n=0)
            whole = await sdk.chat.completions.create(**fields)
            stream = await sdk.chat.completions.create(**fields, stream=True)
            async for _ in stream:
                pass
        return [caught.value.request_id, whole._request_id, stream.response.headers["x-request-id"]]

    assert asyncio.run(main()) == sent
    assert len(set(sent)) == 3


def test_version() -> None:
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/version")

    answer = run(service(FakeEngine(TURN)), scenario)
    assert (answer.status_code, json.loads(answer.text)) == (200, {"version": __version__})
    assert post(service(FakeEngine(TURN)), "/version", {}).status_code == 405
