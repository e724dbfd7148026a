"""One connection: uvicorn's protocol, with bounds on what a client may leave half done.

A head that is too large or not complete in time, a reader that takes nothing, requests sent ahead
without end: all that comes before or after the application, which sees whole requests only.

Requests that are sent ahead are answered one after the other. While one waits, no more is read.
"""

import asyncio
import select
import socket
from asyncio.events import TimerHandle
from typing import Any

from httptools import (
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
)
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from suzuri.server.errors import ApiError

MOST_HEAD = 65_536
"""Bytes of a request line and its headers, give or take what is read at once."""
PART = 2048
"""Bytes that are parsed at a time: what may lie ahead of the request that is answered is less, and
what was read with it."""
LOOK_SECONDS = 0.25
"""Between looks for the end of a connection that is not read."""
_HUNG_UP = getattr(select, "POLLRDHUP", 0)  # Linux; that both ways are closed is always told


class _Flow(FlowControl):
    """`is_held`: nothing is read, whoever is ready for it."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """`head_seconds`: so long may a head take, and a new connection be silent. `reader_seconds`:
    so long may a reader take nothing of what waits for it."""

    head_seconds: float = 60.0
    reader_seconds: float = 60.0

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._head_bytes = 0
        self._in_head = True
        """Between messages too."""
        self._has_begun = False
        """Whether a part of a head is there."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered."""
        self._head_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._look_timer: TimerHandle | None = None
        """While the connection is held."""
        self._unread = bytearray()
        """What has come and is not parsed yet."""
        self._last_words: ApiError | None = None
        """What is to be said once all has been answered that came before."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = self._held_flow = _Flow(transport)
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        # The one above tells the newest request alone, which may wait behind the one that runs.
        self.pipeline.clear()
        self._unread.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _not_in_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    # Requests sent ahead

    def data_received(self, data: bytes) -> None:
        if self._last_words is None:
            self._unread += data
            self._read_on()

    def _read_on(self) -> None:
        """Parse what is there, up to a request that has to wait."""
        while self._unread and not self.pipeline and not self.transport.is_closing():
            part = bytes(self._unread[:PART])
            del self._unread[:PART]
            self._take(part)
        if self.pipeline:
            self._hold()
        else:
            self._release()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._last_words is not None:
            self._refuse(self._last_words)
        else:
            self._read_on()

    def _hold(self) -> None:
        self._held_flow.is_held = True
        self.flow.pause_reading()
        if self._head_timer is not None:  # the rest of a head may be there, and is not looked at
            self._head_timer.cancel()
            self._head_timer = None
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(LOOK_SECONDS, self._look)

    def _release(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        if self._held_flow.is_held:
            self._held_flow.is_held = False
            self.flow.resume_reading()

    def _look(self) -> None:
        """Only a reader is told that the client has gone."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(connection.fileno(), _HUNG_UP)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look_timer = self.loop.call_later(LOOK_SECONDS, self._look)

    # The head

    def _take(self, data: bytes) -> None:
        was_in_head = self._in_head
        try:
            self._feed(data)
        except (HttpParserError, UnicodeDecodeError):
            self.send_400_response("Invalid HTTP request received.")
            return
        if not self._has_begun or self.transport.is_closing():
            return
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)
        self._head_bytes += len(data) if was_in_head else 0
        if self._head_bytes > MOST_HEAD:
            message = f"the head of the request is larger than {MOST_HEAD} bytes"
            self._refuse(ApiError(431, message))

    def _feed(self, data: bytes) -> None:
        """As uvicorn's data_received, which loses the body of a request that offers an upgrade:
        the parser stops behind its head, which is read again here without the offer."""
        self._unset_keepalive_if_required()
        rest = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except HttpParserUpgrade as stop:
                if self._is_tunnel():
                    return
                rest = self._head_without_upgrade() + rest[stop.args[0] :]
                self.parser = _parser(self)

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and not self._is_tunnel()

    def _is_tunnel(self) -> bool:
        """Asked for by CONNECT, which has nothing else to say and is answered as any request."""
        return self.parser.get_method() == b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                kept = b", ".join(word for word in words if word.lower() != b"upgrade")
                lines.append(b"connection: " + kept)
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self._in_head = self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_head = self._has_begun = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_head = True
        super().on_message_complete()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"no whole head came in {self.head_seconds:g} s"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"this is no HTTP request: {msg}"))

    def _refuse(self, error: ApiError) -> None:
        running = self._running
        if running is not None and not running.response_complete and not running.more_body:
            # A fault of what comes behind it, which must not be said in the middle of its answer.
            self._last_words = self._last_words or error
            self._unread.clear()
            return
        body = error.body()
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()
        self._stop_when_unread()

    # The reader

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_when_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._stop_when_unread()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._stop_when_unread()

    def _stop_when_unread(self) -> None:
        """What is not taken in time is dropped."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.reader_seconds, self.transport.abort)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = self._look_timer = None


def _parser(connection: Connection) -> HttpRequestParser:
    """As uvicorn makes them."""
    parser = HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _not_in_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """For HTTP/1.0, which does not know them: an answer of unknown length ends with the
    connection."""
    cycle.chunked_encoding = False

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: Any) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
