"""Requests to a server that is busy, starting, broken or gone: what is asked again, how often."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from suzuri.rl import http_calls
from suzuri.rl.http_calls import Calls, Lost, Refused

Reply = httpx.Response | Exception


def error(status: int, message: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


class Scripted:
    """A server whose replies are given, the last one again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *replies: Reply) -> None:
        self.replies, self.asked = list(replies), list[httpx.Request]()
        self.pauses: list[float] = []
        self.calls = Calls("http://host:1", "secret", tries=3, most_at_once=4)
        real = self.calls.client_fields
        transport = httpx.MockTransport(self._answer)
        monkeypatch.setattr(self.calls, "client_fields", lambda: {**real(), "transport": transport})
        monkeypatch.setattr(http_calls.asyncio, "sleep", self._sleep)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def ask(self, seconds: float = 60.0) -> dict[str, Any]:
        return asyncio.run(self.calls.ask("POST", "/x", {"a": 1}, seconds=seconds))


Script = Callable[..., Scripted]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return lambda *replies: Scripted(monkeypatch, *replies)


OK = httpx.Response(200, json={"b": 2})
GONE = httpx.ConnectError("refused")


def test_the_key_and_the_body_are_sent_and_the_object_comes_back(script: Script) -> None:
    server = script(OK)
    assert server.ask() == {"b": 2}
    (request,) = server.asked
    assert request.headers["authorization"] == "Bearer secret"
    assert request.content == b'{"a":1}' and str(request.url) == "http://host:1/x"


def test_connections_that_fail_are_tried_again_so_often(script: Script) -> None:
    assert script(GONE, httpx.ReadError("reset"), OK).ask() == {"b": 2}
    server = script(GONE)
    with pytest.raises(Lost, match=r"http://host:1/x: ConnectError refused \(asked 3 times\)"):
        server.ask()
    assert len(server.asked) == 3 and server.pauses == [0.1, 0.2]


def test_a_server_that_is_starting_is_given_the_time_it_asks_for(script: Script) -> None:
    starting = error(503, "the engine is loading", **{"retry-after": "2"})
    server = script(starting, OK)
    assert server.ask() == {"b": 2} and server.pauses == [2.0]
    with pytest.raises(Lost, match=r"HTTP 503: the engine is loading \(asked 3 times\)"):
        script(starting).ask()


def test_a_server_that_is_busy_is_asked_until_the_time_is_over(script: Script) -> None:
    busy = error(429, "too many", **{"retry-after": "2"})
    server = script(*[busy] * 20, OK)
    assert server.ask() == {"b": 2} and len(server.asked) == 21
    with pytest.raises(Lost, match="HTTP 429: too many"):
        script(busy).ask(seconds=1.0)


def test_what_fails_there_is_not_asked_again(script: Script) -> None:
    for reply, said in (
        (error(500, "the server failed"), "HTTP 500: the server failed"),
        (httpx.Response(502, text="<html>"), "HTTP 502: Bad Gateway"),
        (httpx.ReadTimeout("slow"), "did not answer within 60 s"),
        (httpx.Response(200, text="hello"), "no JSON object"),
    ):
        server = script(reply)
        with pytest.raises(Lost, match=said):
            server.ask()
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413])
def test_refusals_keep_their_words(script: Script, status: int) -> None:
    with pytest.raises(Refused, match=r"^because$") as refused:
        script(error(status, "because")).ask()
    assert refused.value.status == status
