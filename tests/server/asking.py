"""Asking an application in this process, for the tests of the HTTP side alone."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from suzuri.server.app import create_app
from suzuri.server.service import Service

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ids(text: str) -> list[int]:
    """As FakeTexts has them."""
    return list(text.encode())


def run(
    made: Service, scenario: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], **limits: Any
) -> Any:
    """The result of a scenario against an application of `made`; nothing is held at its end."""

    async def main() -> Any:
        transport = httpx.ASGITransport(app=create_app(made, **limits), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            result = await scenario(client)
        assert made.num_pending == 0
        assert not made.works
        return result

    return asyncio.run(main())


def post(made: Service, path: str, body: Any, **limits: Any) -> httpx.Response:
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        if isinstance(body, bytes):
            headers = {"content-type": "application/json"}
            return await client.post(path, content=body, headers=headers)
        return await client.post(path, json=body)

    return run(made, scenario, **limits)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]
