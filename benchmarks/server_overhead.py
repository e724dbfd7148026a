"""What the server costs: streamed tokens per second of one core, with an engine that returns at
once, beside bare streams of server-sent events of the same framework in the same process: ready
chunks ("bare"), and ready chunks that come through a queue, as what an engine writes must ("fed").

    python benchmarks/server_overhead.py [--streams 50] [--tokens 400] [--rounds 5]

Each stream is read to its end over a socket by this process; counted is the CPU time of the
server's process, which does nothing else. One token is one chunk. Rounds alternate; medians are
printed, and written to benchmarks/results/server-overhead.json with --write. All of it on uvloop's
event loop, which `suzuri serve` takes where it is installed, and on asyncio's own.
"""

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import platform
import selectors
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi.responses import StreamingResponse

from suzuri.engine.messages import Accepted, Event, Ready, Stats, WeightsUpdated
from suzuri.engine.stream import Stream
from suzuri.model.config import NUM_IDS, preset
from suzuri.processing.tokenizer import CONTENT_TEXT
from suzuri.server.app import create_app
from suzuri.server.service import Service
from suzuri.server.text_messages import Encode, Prompts, Render

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "server-overhead.json"
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"fake","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
"""As long as a chunk of the chat endpoint."""


class InstantEngine:
    """Gives every stream one token per turn of the loop, as a step of an engine would."""

    def __init__(self) -> None:
        self.ready: Ready | None = Ready(
            version=1,
            model="fake",
            max_context=1 << 20,
            max_running=4096,
            config=preset("tiny"),
            dtype="bfloat16",
            device="none",
            weight_version=0,
            fingerprint={},
        )
        self.why_not_ready, self.stats, self.num_restarts = "", Stats(), 0
        self.on_step: Callable[[Stats], None] | None = None
        self._running: list[tuple[Stream, int]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, prompt: Any, params: Any, **fields: Any) -> Stream:
        stream = Stream(0, 1, lambda id: None)
        stream.accept(Accepted(0, len(prompt)))
        self._running.append((stream, params.max_tokens))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        return stream

    async def update_weights(self, folder: str, **fields: Any) -> WeightsUpdated:
        raise AssertionError("it has none")

    async def _steps(self) -> None:
        first = Event(0, 0, CONTENT_TEXT, "")
        middle, last = Event(0, 0, 1000, ""), Event(0, 0, 1000, "", "length")
        done = 0
        while self._running:
            running, self._running = self._running, []
            for stream, left in running:
                stream.push(last if left == 1 else first if done == 0 else middle)
            self._running += [(stream, left - 1) for stream, left in running if left > 1]
            done += 1
            await asyncio.sleep(0)


class Feed:
    """Puts one ready chunk per turn of the loop into each queue, as InstantEngine does."""

    def __init__(self) -> None:
        self._running: list[tuple[asyncio.Queue[bytes], int]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, tokens: int) -> "asyncio.Queue[bytes]":
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._running.append((queue, tokens))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        return queue

    async def _steps(self) -> None:
        while self._running:
            running, self._running = self._running, []
            for queue, _ in running:
                queue.put_nowait(CHUNK)
            self._running += [(queue, left - 1) for queue, left in running if left > 1]
            await asyncio.sleep(0)


class InstantTexts:
    token_bytes = [b" word"] * NUM_IDS
    why_not_ready: str | None = None

    async def ask(self, question: Encode | Render) -> Prompts:
        return Prompts([[1, 2, 3]])


def loops() -> dict[str, LoopFactory | None]:
    found: dict[str, LoopFactory | None] = {"asyncio": None}
    if importlib.util.find_spec("uvloop") is not None:
        found["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return found


def serve(listener: socket.socket, loop: LoopFactory | None = None) -> None:
    service = Service(
        engine=InstantEngine(), texts=InstantTexts(), names=("fake",), most_pending=10**6
    )
    app = create_app(service)

    async def bare(tokens: int) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(tokens):
                yield CHUNK
                await asyncio.sleep(0)

        return StreamingResponse(chunks(), media_type="text/event-stream")

    feed = Feed()

    async def fed(tokens: int) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            queue = feed.add(tokens)
            for _ in range(tokens):
                yield await queue.get()

        return StreamingResponse(chunks(), media_type="text/event-stream")

    app.add_api_route("/bare", bare, methods=["POST"])
    app.add_api_route("/fed", fed, methods=["POST"])
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))


def cpu_seconds(pid: int) -> float:
    """Of another process, by the clock that clock_getcpuclockid gives: in nanoseconds, where
    /proc counts in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)


def read_all(port: int, path: str, body: bytes, streams: int) -> int:
    """Bytes that came over so many streams at once."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head + body)
        selector.register(connection, selectors.EVENT_READ)
    total = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            total += len(data)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return total


def measure(streams: int, tokens: int, rounds: int, loop: LoopFactory | None) -> dict[str, float]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, loop))
    process.start()
    assert process.pid is not None
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True}
    ways = {
        "chat": ("/v1/chat/completions", json.dumps(body).encode()),
        "bare": (f"/bare?tokens={tokens}", b"{}"),
        "fed": (f"/fed?tokens={tokens}", b"{}"),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        time.sleep(1)
        for round in range(rounds + 1):
            for name, (path, data) in ways.items():
                before = cpu_seconds(process.pid)
                size = read_all(port, path, data, streams)
                took = cpu_seconds(process.pid) - before
                assert size > streams * tokens * 150, f"{name}: {size} bytes are not all of it"
                if round:  # the first one warms up
                    rates[name].append(streams * tokens / took)
    finally:
        process.terminate()
        process.join()
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    for place, loop in loops().items():
        rates = measure(args.streams, args.tokens, args.rounds, loop)
        found[place] = {name: round(rate) for name, rate in rates.items()}
        for name, rate in rates.items():
            print(f"{place:<8} {name:<6} {rate:10,.0f} tokens per second of one core")
        for name in ("bare", "fed"):
            print(f"{place:<8} {name} / chat = {rates[name] / rates['chat']:.2f}")
    if args.write:
        # Not before: it brings torch, which no server's process has, with objects to collect.
        from suzuri.tools.bench.record import commit

        record = {
            "commit": commit(ROOT),
            "machine": f"{platform.machine()}, {cpu_name()}, {os.cpu_count()} cores",
            "command": f"server_overhead.py --streams {args.streams} --tokens {args.tokens} "
            f"--rounds {args.rounds}",
            "load_average": round(os.getloadavg()[0], 2),
            "tokens_per_core_second": found,
        }
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main()
