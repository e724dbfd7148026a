"""What every request passes first: its key, its size, and the time that sending it takes."""

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from suzuri.server.errors import ApiError

OPEN_PATHS = ("/health", "/health/live", "/health/ready")
"""What a load balancer asks without a key."""


class Limits:
    """ASGI middleware. Keys are compared as hashes, all of them, in constant time; none is logged.

    A body above `max_body` bytes gets 413, without being read where its length is announced; one
    that is not there after `body_seconds` gets 408.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], max_body: int, body_seconds: float
    ) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body, self._seconds = max_body, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        error = self._refusal(scope["path"], headers)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._keys and path not in OPEN_PATHS and not self._knows(headers):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            return self._too_large()
        return None

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)

    def _too_large(self) -> ApiError:
        megabytes = self._max_body / 1e6
        return ApiError(413, f"the request is larger than {megabytes:g} MB, the most taken here")

    def _limited(self, receive: Receive) -> Receive:
        size = 0
        complete = False
        deadline: float | None = None

        async def limited() -> Message:
            nonlocal size, complete, deadline
            if complete:
                return await receive()
            loop = asyncio.get_running_loop()
            deadline = deadline or loop.time() + self._seconds
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except TimeoutError as error:
                raise ApiError(408, f"no whole request came in {self._seconds:g} s") from error
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._max_body:
                    raise self._too_large()
                complete = not message.get("more_body", False)
            return message

        return limited
