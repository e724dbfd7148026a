"""An id for each request, in the header that OpenAI's clients look for (`_request_id`)."""

import uuid
from collections.abc import Awaitable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
LONGEST = 128
"""Characters of an id that a client may choose."""
_NAME, _STATE = HEADER.encode(), "request_id"


class RequestIds:
    """ASGI middleware: the client's own id where it sent one of visible ASCII characters, else a
    new one. The id is only told and logged; nothing is looked up by it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id = _chosen(dict(scope["headers"]).get(_NAME, b"")) or uuid.uuid4().hex
        scope.setdefault("state", {})[_STATE] = id
        header = (_NAME, id.encode())

        # Not a coroutine of its own: it is called for each chunk of a stream.
        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        await self.app(scope, receive, named)


def request_id(request: Request) -> str:
    """Of a request that has passed the middleware."""
    known: Any = getattr(request.state, _STATE)
    return known


def _chosen(value: bytes) -> str | None:
    if 0 < len(value) <= LONGEST and all(0x20 < sign < 0x7F for sign in value):
        return value.decode("ascii")
    return None
