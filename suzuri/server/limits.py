"""What every request passes first: its key, its size, and the time that sending it takes."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from suzuri.server.errors import RETRY_SECONDS, ApiError

RELEASE = "release_body"
MOST_DIGITS = 18
OPEN_PATHS = ("/health", "/health/live", "/health/ready")
"""What a load balancer asks without a key."""


class Limits:
    """ASGI middleware. Keys are compared as hashes, all of them, in constant time; none is logged.

    A body above `max_body` bytes gets 413, without being read where its length is announced; one
    that is not there after `body_seconds` gets 408; one that would make all bodies that are held
    larger than `max_bodies` gets 429. A body is held until the answer is over, or until the route
    says `release_body`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        max_body: int,
        max_bodies: int,
        body_seconds: float,
    ) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body, self._max_bodies, self._seconds = max_body, max_bodies, body_seconds
        self.held = 0
        """Bytes of all bodies that are being read or used."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        error = self._refusal(scope["path"], headers)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        body = _Body(self)
        scope.setdefault("state", {})[RELEASE] = body.release
        try:
            await self._app(scope, self._limited(receive, body), send)
        finally:
            body.release()

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._keys and path not in OPEN_PATHS and not self._knows(headers):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > MOST_DIGITS or int(length) > self._max_body):
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

    def _limited(self, receive: Receive, body: "_Body") -> Receive:
        complete = False
        deadline: float | None = None

        async def limited() -> Message:
            nonlocal complete, deadline
            if complete:
                return await receive()
            loop = asyncio.get_running_loop()
            deadline = deadline or loop.time() + self._seconds
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except TimeoutError as error:
                raise ApiError(408, f"no whole request came in {self._seconds:g} s") from error
            if message["type"] == "http.request":
                body.add(len(message.get("body", b"")))
                if body.size > self._max_body:
                    raise self._too_large()
                if self.held > self._max_bodies:
                    raise ApiError(
                        429,
                        "the requests that are being read are too large together; send this one "
                        "again later",
                        code="queue_full",
                        retry=RETRY_SECONDS,
                    )
                complete = not message.get("more_body", False)
            return message

        return limited


class _Body:
    """The size of one body, as long as it is held."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.size = 0

    def add(self, size: int) -> None:
        self.size += size
        self._limits.held += size

    def release(self) -> None:
        """May be called again."""
        self._limits.held -= self.size
        self.size = 0


def release_body(request: Request) -> None:
    """The body of this request, and what was made of it, is not held any more."""
    release: Callable[[], None] = getattr(request.state, RELEASE)
    release()
