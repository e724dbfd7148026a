"""Streams of completions as a client sees them: when each token came, and what follows from that.

For http_serving.py. A stream is read by a protocol that only notes what came when: a client library
takes longer over a chunk than the server does, and would be what is measured. Read `run` first.
"""

import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

FIRST_TOKEN_MS, BETWEEN_MS = 1000.0, 50.0
"""A request is good when its first token takes no longer, and each further one on average."""
CHUNK, USAGE = b'data: {"id"', b'"choices":[]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: seconds after the start, ids of its prompt, tokens of its answer."""

    at: float
    prompt: list[int]
    tokens: int


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What came of a request, in seconds after the start. `times`: of the chunks with text, so a
    token that ends no character has none; the last one is that of the last token."""

    at: float
    times: list[float] = dataclasses.field(default_factory=list[float])
    num_tokens: int = 0
    cached: int = 0
    error: str = ""


class _Reader(asyncio.Protocol):
    """Sends one request, and keeps what comes until the connection is closed."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def http_request(port: int, asked: Asked) -> bytes:
    body = {
        "prompt": asked.prompt,
        "max_tokens": asked.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + data


async def _follow(port: int, asked: Asked, data: bytes, start: float, limit: float) -> Seen:
    await asyncio.sleep(max(0.0, start + asked.at - time.perf_counter()))
    seen = Seen(at=asked.at)
    loop = asyncio.get_running_loop()
    try:
        transport, reader = await loop.create_connection(lambda: _Reader(data), "127.0.0.1", port)
    except OSError as error:
        seen.error = str(error)
        return seen
    try:
        await asyncio.wait_for(reader.closed, max(0.0, limit - time.perf_counter()))
    except TimeoutError:
        seen.error = "took too long"
    finally:
        transport.abort()
    read(reader.pieces, start, seen)
    if not seen.error and seen.num_tokens != asked.tokens:
        seen.error = f"{seen.num_tokens} of {asked.tokens} tokens came"
    return seen


def read(pieces: Sequence[tuple[float, bytes]], start: float, seen: Seen) -> None:
    """Fills `seen` from what came when."""
    whole = b"".join(data for _, data in pieces)
    ends = list(itertools.accumulate(len(data) for _, data in pieces))
    if not whole.startswith(b"HTTP/1.1 200"):
        seen.error = seen.error or whole[:300].decode("latin-1") or "the connection was closed"
        return
    piece, place = 0, whole.find(CHUNK)
    while place >= 0:
        after = whole.find(CHUNK, place + 1)
        text = whole[place : after if after >= 0 else None]
        while ends[piece] <= place:
            piece += 1
        if USAGE in text:
            line = text.split(b"\n", 1)[0].removeprefix(b"data: ")
            usage = json.loads(line)["usage"]
            seen.num_tokens = usage["completion_tokens"]
            seen.cached = usage["prompt_tokens_details"]["cached_tokens"]
        else:
            seen.times.append(pieces[piece][0] - start)
        place = after


def run(port: int, requests: Sequence[Asked], limit: float) -> list[Seen]:
    """Sends each at its time; all must have ended `limit` seconds after the start."""

    async def all_of_them() -> list[Seen]:
        ready = [http_request(port, asked) for asked in requests]
        start = time.perf_counter() + 0.05
        follow = (
            _follow(port, asked, data, start, start + limit)
            for asked, data in zip(requests, ready, strict=True)
        )
        return list(await asyncio.gather(*follow))

    return asyncio.run(all_of_them())


# Requests


def prompts(
    ids: Sequence[int], number: int, length: int, *stream: int | float | str
) -> list[list[int]]:
    """Random ids, another prompt for every stream, so that no prefix is shared."""
    draw = random.Random(" ".join(map(str, stream)))
    return [draw.choices(ids, k=length) for _ in range(number)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Of a Poisson process, at least one."""
    draw = random.Random(f"{seed} {rate}")
    found = [0.0]
    while (after := found[-1] + draw.expovariate(rate)) < seconds:
        found.append(after)
    return found


# What follows


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: ordered[min(int(p * len(ordered)), last)] for name, p in places.items()}
    return found | {"max": ordered[last]}


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """Of requests that came over time; those that failed are no good ones."""
    whole = [one for one in seen if not one.error and one.times]
    first = [1e3 * (one.times[0] - one.at) for one in whole]
    between = [1e3 * (one.times[-1] - one.times[0]) / max(one.num_tokens - 1, 1) for one in whole]
    good = sum(a <= FIRST_TOKEN_MS and b <= BETWEEN_MS for a, b in zip(first, between, strict=True))
    gaps = [1e3 * (b - a) for one in whole for a, b in itertools.pairwise(one.times)]
    end = max((one.times[-1] for one in whole), default=0.0)
    return {
        "requests": len(seen),
        "errors": sorted({one.error for one in seen if one.error}),
        "seconds": end,
        "output_tokens": sum(one.num_tokens for one in whole),
        "output_tokens_per_s": sum(one.num_tokens for one in whole) / end if end else 0.0,
        "cached_tokens": sum(one.cached for one in whole),
        "ttft_ms": percentiles(first),
        "tpot_ms": percentiles(between),
        "itl_ms": percentiles(gaps),
        "goodput": good / len(seen) if seen else 0.0,
    }


def steady_ms(seen: Sequence[Seen]) -> float:
    """Milliseconds of a step while all sequences decode: from the last one's first token to the
    first one's last token. Each sequence has one token a step, which may have no chunk; what comes
    of one step comes close together, so a step is a pause between the chunks of all."""
    begin = max(one.times[0] for one in seen)
    end = min(one.times[-1] for one in seen)
    inside = [[at for at in one.times if begin <= at <= end] for one in seen]
    gaps = [b - a for times in inside for a, b in itertools.pairwise(times)]
    if not gaps:
        return 0.0
    pause = 0.3 * statistics.median(gaps)
    together = sorted(itertools.chain.from_iterable(inside))
    steps = sum(b - a > pause for a, b in itertools.pairwise(together))
    return 1e3 * (end - begin) / steps if steps else 0.0


def closed(rounds: Sequence[Sequence[Seen]]) -> dict[str, Any]:
    """Of batches that were asked for all at once: medians of the rounds."""
    seconds = [max(one.times[-1] for one in seen) for seen in rounds]
    tokens = sum(one.num_tokens for one in rounds[0])
    steady = [steady_ms(seen) for seen in rounds]
    first = [max(one.times[0] for one in seen) for seen in rounds]
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "rounds_s": seconds,
        "tokens_per_s": tokens / median,
        "step_ms": statistics.median(steady),
        "rounds_step_ms": steady,
        "all_first_s": statistics.median(first),
    }
