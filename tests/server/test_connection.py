"""Clients that send or read badly, over real sockets, with a scripted engine (s09 s11 a09)."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar

import pytest
import uvicorn

from suzuri.engine.messages import Event
from suzuri.engine.stream import UNREAD_EVENTS, Stream
from suzuri.server.app import create_app
from suzuri.server.protocol import MOST_HEAD, PART, Connection
from suzuri.server.service import Service
from tests.server.asking import COMPLETIONS
from tests.server.fakes import FakeEngine, service
from tests.waiting import PATIENCE, until_async


class Quick(Connection):
    """For what is cut off in time. Whatever must not be belongs on a plain Connection, or is sent
    as the client connects: it is there then before any time is counted."""

    head_seconds = 0.3
    reader_seconds = 1.0


class Site:
    """A server in this loop, and the ways to it."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self._server, self._port = server, port

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def open(
        self, first: bytes = b"", *, small: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`first`: a few bytes that are on their way before the server sees the connection.
        `small`: hardly anything is buffered on the way to this client."""
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(first)
        connection.setblocking(False)
        return await asyncio.open_connection(sock=connection, limit=2048 if small else 2**20)

    async def send(self, *parts: bytes, first: bytes = b"") -> bytes:
        """What comes back until the server closes."""
        reader, writer = await self.open(first)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), PATIENCE)
        return b""

    async def settled(self) -> None:
        """Once no connection is open."""
        await until_async(lambda: not self.num_connections)


@contextlib.asynccontextmanager
async def site(
    made: Service, connection: type[Connection], keep_alive: float
) -> AsyncIterator[Site]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(made),
        http=connection,
        ws="none",
        log_config=None,
        lifespan="off",
        timeout_keep_alive=keep_alive,  # pyright: ignore[reportArgumentType]
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    yield Site(server, listener.getsockname()[1])
    await server.shutdown([listener])


def serve(
    scenario: Callable[[Site], Coroutine[Any, Any, None]],
    made: Service | None = None,
    connection: type[Connection] = Connection,
    keep_alive: float = PATIENCE,
) -> None:
    made = made or service(FakeEngine([120], finish="length"))

    async def main() -> None:
        async with site(made, connection, keep_alive) as found:
            await scenario(found)
        assert made.num_pending == 0
        assert not made.works

    asyncio.run(asyncio.wait_for(main(), 3 * PATIENCE))


def request(body: dict[str, Any], *, close: bool = True) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n" + "Connection: close\r\n" * close
    return head.encode() + b"\r\n" + data


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


LINE = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [LINE, *[b"x-%d: y\r\n" % number for number in range(20_000)]],
        [LINE + b"x: ", *[b"y" * 10_000] * 60],
        [b"GET /", *[b"y" * 10_000] * 60],
    ],
)
def test_heads_are_bounded(parts: list[bytes]) -> None:
    """s09: a bomb of headers, one without end, a path without end."""

    async def scenario(found: Site) -> None:
        answer = await found.send(*parts)
        if answer:  # what was still being sent may have cost the client its answer
            assert error_of(answer)[0] in (431, 400)
        await found.settled()

    serve(scenario)


def test_a_large_head_that_is_just_small_enough() -> None:
    async def scenario(found: Site) -> None:
        more = b"x: " + b"y" * (MOST_HEAD - 1000) + b"\r\nConnection: close\r\n\r\n"
        assert b"200 OK" in await found.send(LINE, more)

    serve(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_object(sent: bytes) -> None:
    """s09"""

    async def scenario(found: Site) -> None:
        status, error = error_of(await found.send(sent))
        assert status in (400, 404)
        assert error["type"] in ("invalid_request_error", "not_found_error")
        await found.settled()

    serve(scenario)


def test_other_protocols_are_not_spoken() -> None:
    """s12: a socket of another kind would be a way round the key."""

    async def scenario(found: Site) -> None:
        upgrade = (
            b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        )
        answer = await found.send(LINE + upgrade + b"Sec-WebSocket-Key: YQ==\r\n\r\n")
        assert b"101" not in answer.split(b"\r\n")[0]

    serve(scenario)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


@pytest.mark.parametrize("cut", [1, 60, 10_000])
def test_an_offered_upgrade_costs_no_body(cut: int) -> None:
    """As `curl --http2` sends it, whole or in parts."""
    engine = FakeEngine([120], finish="length")
    plain = request({"prompt": "some words"}, close=False)
    whole = plain + plain.replace(b"Host: x\r\n", b"Host: x\r\n" + UPGRADE)

    async def scenario(found: Site) -> None:
        parts = [whole[start : start + cut] for start in range(0, len(whole), cut)]
        answer = await found.send(*parts)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert [bytes(prompt) for prompt, _, _ in engine.added] == [b"some words"] * 2

    serve(scenario, service(engine))


@pytest.mark.parametrize("stream", [True, False])
def test_an_older_client_gets_no_chunks(stream: bool) -> None:
    sent = request({"prompt": "x", "stream": stream}, close=False).replace(b"/1.1", b"/1.0")

    async def scenario(found: Site) -> None:
        head, _, body = (await found.send(sent)).partition(b"\r\n\r\n")
        assert head.split()[1] == b"200"
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        if stream:
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(body)["choices"]

    serve(scenario, service(FakeEngine([120, 121], finish="length")))


def test_silence_and_half_heads_end() -> None:
    """s09: connections that are opened and left, at once or after an answer."""

    async def scenario(found: Site) -> None:
        whole = LINE + b"Connection: keep-alive\r\n\r\n"
        for first, parts, answers in ((b"", [], 0), (LINE, [], 0), (whole, [LINE], 1)):
            answer = await found.send(*parts, first=first)
            assert answer.count(b"200 OK") == answers
            assert answer.count(b"HTTP/1.1 408") == 1
        await found.settled()

    serve(scenario, connection=Quick)


def test_small_answers_are_sent_at_once() -> None:
    """Held back until the client has acknowledged the one before, a token would be 40 ms late."""

    class Seen(Connection):
        delays: ClassVar[list[bool]] = []

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            there = transport.get_extra_info("socket")
            self.delays.append(not there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def scenario(found: Site) -> None:
        assert b"200 OK" in await found.send(LINE + b"Connection: close\r\n\r\n")

    serve(scenario, connection=Seen)
    assert Seen.delays == [False]


def test_connections_are_kept_between_whole_requests() -> None:
    async def scenario(found: Site) -> None:
        sent = request({"prompt": "x"}, close=False)
        reader, writer = await found.open(sent)
        for number in range(3):
            if number:
                writer.write(sent)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            answer = json.loads(await reader.read(2000))
            assert answer["choices"][0]["text"] == "x"
            await asyncio.sleep(0.35)  # longer than a head may take
        writer.close()

    serve(scenario, connection=Quick)


class Endless(FakeEngine):
    """Writes until it is told to stop; `batch` tokens at a time."""

    def __init__(self, batch: int = 20) -> None:
        super().__init__([])
        self.holds = True
        self.batch = batch
        self.written = 0

    def add(self, *args: Any, **fields: Any) -> Stream:
        stream = super().add(*args, **fields)
        self.run(self._write_on(stream))
        return stream

    async def _write_on(self, stream: Stream) -> None:
        while stream.id not in self.aborted:
            for _ in range(self.batch):
                stream.push(Event(stream.id, 0, 65, "A" * 50))
                self.written += 1
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("batch", "seconds"), [(20, 0.5), (2000, 3600.0)])
def test_a_stream_that_nobody_reads_is_cut_off(batch: int, seconds: float) -> None:
    """s11: in time, and sooner when too much waits; another reader of the same server goes on."""
    engine = Endless(batch)
    made = service(engine, reader_seconds=seconds)

    async def scenario(found: Site) -> None:
        body = {"prompt": "x", "stream": True, "max_tokens": None}
        _, stuck = await found.open(small=True)
        stuck.write(request(body))
        await until_async(lambda: engine.aborted and not made.num_pending)
        assert engine.written < 3 * UNREAD_EVENTS
        assert (
            'slow_readers_total{model_name="fake"} 1.0'
            in made.metrics.text(engine.stats, ready=True, restarts=0).decode()
        )
        stuck.transport.abort()
        reader, writer = await found.open()
        writer.write(request(body))
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"data: ")
        writer.close()
        await found.settled()

    serve(scenario, made)


def test_a_slow_reader_does_not_hold_up_others() -> None:
    """s11: some read a little now and then, others all; each gets its own whole."""
    engine = FakeEngine([65] * 3000, finish="length")

    async def scenario(found: Site) -> None:
        body = {"prompt": "x", "stream": True, "max_tokens": None}
        slow = [await found.open(small=True) for _ in range(5)]
        for _, writer in slow:
            writer.write(request(body))
        answer = await found.send(request(body))  # while those have read nothing
        assert answer.count(b'"text":"A"') == 3000

        async def read(reader: asyncio.StreamReader) -> bytes:
            parts: list[bytes] = []
            while part := await reader.read(50_000):
                parts.append(part)
                await asyncio.sleep(0.001)
            return b"".join(parts)

        for whole in await asyncio.gather(*(read(reader) for reader, _ in slow)):
            assert whole.count(b'"text":"A"') == 3000

    serve(scenario, service(engine))


@pytest.mark.parametrize(("count", "keep_alive"), [(12, 1.0), (300, PATIENCE)])
def test_whole_answers_that_nobody_reads_are_dropped(count: int, keep_alive: float) -> None:
    """s11: the answer is small beside what many such clients would hold; with 12 of them the
    kernel may hold all."""

    seen: list[Connection] = []

    class Seen(Quick):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            seen.append(self)

    async def scenario(found: Site) -> None:
        sent = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * count
        clients = [await found.open(sent, small=True) for _ in range(5)]
        await until_async(lambda: len(seen) == len(clients))
        await found.settled()

    serve(scenario, connection=Seen, keep_alive=keep_alive)


def test_a_client_that_sends_ahead_and_leaves_frees_everything() -> None:
    """s01 a09: with a second request behind the one that is being answered."""
    engine = FakeEngine([])
    engine.holds = True

    async def scenario(found: Site) -> None:
        for stream in (False, True):
            _, writer = await found.open()
            body = {"prompt": "x", "n": 3, "stream": stream}
            writer.write(request(body, close=False) * 3)
            await until_async(lambda count=1 + stream: len(engine.added) == count)
            writer.close()
            await found.settled()
            await until_async(lambda count=1 + stream: len(engine.aborted) == count)

    serve(scenario, service(engine))
    assert engine.aborted == [0, 1]
    assert len(engine.added) == 2, "what was sent ahead is not begun"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", [100, 10**9])
def test_requests_sent_ahead_are_answered_in_order(stream: bool, cut: int) -> None:
    """However many, of all sizes, and however they are cut."""
    engine = FakeEngine([120], finish="length")
    prompts = [str(number) + "y" * (number * 97 % 4000) for number in range(150)]
    bodies = [{"prompt": prompt, "stream": stream} for prompt in prompts]
    whole = b"".join(request(body, close=False) for body in bodies[:-1]) + request(bodies[-1])

    async def scenario(found: Site) -> None:
        answer = await found.send(*(whole[at : at + cut] for at in range(0, len(whole), cut)))
        assert answer.count(b"HTTP/1.1 200 OK") == len(prompts)
        assert [bytes(prompt).decode() for prompt, _, _ in engine.added] == prompts

    serve(scenario, service(engine))


def test_requests_sent_ahead_wait_where_they_are() -> None:
    """Heads, bodies, small requests without end: what is held of them is less than was read at
    once, the sender is held up, and its going away is seen."""
    engine = FakeEngine([])
    engine.holds = True
    seen: list[Connection] = []

    class Seen(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            seen.append(self)

    async def scenario(found: Site) -> None:
        large = request({"prompt": "z" * 200_000}, close=False)
        head = LINE + b"x: " + b"y" * 60_000 + b"\r\n\r\n"
        for number, behind in enumerate((LINE + b"\r\n", large, head, request({"prompt": "x"}))):
            _, writer = await found.open()
            writer.write(request({"prompt": "first"}, close=False))
            await until_async(lambda count=number + 1: len(engine.added) == count)
            writer.write(behind * (40_000_000 // len(behind)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.5)
            held = seen[-1]
            bodies = sum(len(cycle.body) for cycle, _ in held.pipeline)
            assert len(held.pipeline) <= PART // len(LINE)
            assert bodies <= PART
            assert len(held._unread) <= 2**19
            # By a reset: the end of what is sent would come behind what nobody reads yet.
            there = writer.get_extra_info("socket")
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await found.settled()
            await until_async(lambda count=number + 1: len(engine.aborted) == count)

    serve(scenario, service(engine), Seen)
    assert engine.aborted == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("behind", "status"), [(b"nonsense\r\n\r\n", 400), (LINE, 408), (LINE + b"y" * 80_000, 431)]
)
def test_a_fault_behind_a_request_does_not_break_its_answer(behind: bytes, status: int) -> None:
    """The answer comes whole, then the error."""
    engine = FakeEngine([])
    engine.holds = True

    async def scenario(found: Site) -> None:
        sent = request({"prompt": "x", "stream": True}, close=False) + behind
        reader, writer = await found.open(sent)
        await until_async(lambda: engine.added)
        await asyncio.sleep(2 * Quick.head_seconds)
        engine.streams[0].push(Event(0, 0, 65, "A", "length"))
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        first, last = answer.split(b"0\r\n\r\n")
        assert first.count(b"HTTP/1.1") == 1
        assert b"data: [DONE]" in first
        assert error_of(last)[0] == status
        writer.close()

    serve(scenario, service(engine), Quick)
