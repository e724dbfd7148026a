"""The events of one request to an engine's process, as they come. Filled by client.py. No torch
here."""

# pyright: strict

import asyncio
from collections.abc import Callable, Sequence

from suzuri.engine.messages import Accepted, Event

UNREAD_EVENTS = 65_536
"""Of one request: one whose reader is so far behind ends. About 20 MB."""


class EngineUnavailable(Exception):
    """The engine died, hangs, or is not up; the request is lost and may be sent again."""


class RequestRefused(ValueError):
    """The engine cannot run this request; what to change is in the text."""


class Stream:
    """The events of one request, as they come. `close` ends the request wherever it is."""

    def __init__(self, id: int, n: int, abort: Callable[[int], None]) -> None:
        self.id = id
        self.accepted: Accepted | None = None
        self.is_behind = False
        """Whether it ended because its reader left too much unread."""
        self._left = n
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._abort = abort

    @property
    def num_left(self) -> int:
        """Samples that have not ended."""
        return self._left

    @property
    def is_done(self) -> bool:
        """Whether `next` would bring nothing more."""
        return self._left == 0 and not self._events and self._error is None

    async def next(self) -> list[Event]:
        """All events that have come since the last call, at least one.

        Raises RequestRefused, or EngineUnavailable once what came before is out.
        """
        if not self._events:
            await self.wait()
        return self.take()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def error(self) -> Exception | None:
        """What ended the request from outside."""
        return self._error

    @property
    def has_news(self) -> bool:
        """Whether `next` would return, or raise, at once."""
        return bool(self._events) or self._error is not None

    def take(self) -> list[Event]:
        """What has come since the last call."""
        events, self._events = self._events, []
        return events

    async def wait(self) -> None:
        """Until there are events. Raises as `next` does."""
        while not self._events:
            if self._error is not None:
                raise self._error
            assert self._left, "the request is over"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    @staticmethod
    async def wait_any(streams: "Sequence[Stream]") -> None:
        """Until one of them has news."""
        while not any(stream.has_news for stream in streams):
            assert any(stream._left for stream in streams), "the requests are over"
            waiter = asyncio.get_running_loop().create_future()
            for stream in streams:
                stream._waiter = waiter
            await waiter

    async def wait_accepted(self) -> Accepted:
        """Raises as `next` does."""
        while self.accepted is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.accepted

    def close(self) -> None:
        """Ends the request if it still runs. May be called again."""
        if self._left and self._error is None:
            self._left = 0
            self._abort(self.id)

    def accept(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self._wake()

    def push(self, event: Event) -> None:
        if self._error is not None:
            return
        self._events.append(event)
        if event.finish is not None:
            self._left -= 1
        if len(self._events) > UNREAD_EVENTS and self._left:
            self.is_behind = True
            self.close()
            self.fail(EngineUnavailable("the answer was not read as fast as it was written"))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._left, self._error = 0, error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
