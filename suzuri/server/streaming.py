"""Answers that end when their reader does: whole ones, and server-sent events.

`watched` and `EventStream` both listen for the client going away, and free the request at once.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from suzuri.server.errors import ApiError
from suzuri.server.service import Work

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((sign.encode(), b"\\u%04x" % ord(sign)) for sign in ("\x85", "\u2028", "\u2029"))
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event_frame(work: Work, kind: str, *, usage: bool) -> tuple[dict[str, Any], bytes, bytes]:
    """(fields that every chunk of `work` has, what stands before the choices of one, and after):
    all but the choices is the same in every chunk and written once."""
    head = {"id": work.id, "object": kind, "created": work.created, "model": work.model}
    before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
    return head, before, b'],"usage":null}\n\n' if usage else b"]}\n\n"


def counted(num_prompt: int, num_written: int) -> bytes:
    """What stands after the choices of a chunk that tells the tokens so far: of the prompt, and of
    the chunk's own choice."""
    return b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
        num_prompt,
        num_written,
        num_prompt + num_written,
    )


def one_lined(events: bytes) -> bytes:
    """Events with an escape for each character that some readers, httpx among them, take for the
    end of a line. In UTF-8 these bytes stand for nothing else, and only within strings."""
    if events.isascii():  # most of them, told in no time
        return events
    for sign, escape in _LINE_ENDS:
        events = events.replace(sign, escape)
    return events


class ClientGone(Exception):
    """Nobody is left to answer."""


async def watched(request: Request, answer: Coroutine[Any, Any, Result]) -> Result:
    """The result of `answer`, which is cancelled when the client goes away (ClientGone)."""
    task = asyncio.ensure_future(answer)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Ends when the client has gone; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `chunks`, each whole server-sent events, then closes `work`.

    An ApiError from `chunks` becomes an event with OpenAI's error. A reader that takes nothing for
    `reader_seconds`, or is too far behind what is written for it, is cut off.
    """

    media_type = "text/event-stream"

    def __init__(self, work: Work, chunks: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._work, self._chunks = work, chunks
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        stalled = asyncio.ensure_future(self._stalled())
        metrics = self._work.service.metrics
        try:
            await asyncio.wait({task, gone, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                metrics.disconnects.inc()
                metrics.slow_readers.inc(not gone.done())
        finally:
            self._work.close()
            for one in (task, gone, stalled):
                one.cancel()
            await asyncio.gather(task, gone, stalled, return_exceptions=True)
            await self._chunks.aclose()
        if not task.cancelled():
            task.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        loop = asyncio.get_running_loop()
        try:
            async for chunk in self._chunks:
                self._sending_since = loop.time()
                body = one_lined(chunk)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sending_since = None
        except ApiError as error:
            event = one_lined(b"data: " + error.body() + b"\n\n" + DONE)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stalled(self) -> None:
        """Ends when one chunk has not been taken for too long, or too many wait behind it."""
        limit, loop = self._work.service.reader_seconds, asyncio.get_running_loop()
        pause = min(limit / 4, 1.0)
        while self._sending_since is None or not (
            loop.time() - self._sending_since >= limit or self._work.is_behind
        ):
            await asyncio.sleep(pause)
