"""EngineClient with a real engine: hangs, crashes and refusals reach whoever waits."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from suzuri.engine import client as engine_client
from suzuri.engine.client import EngineClient
from suzuri.engine.config import EngineConfig
from suzuri.engine.messages import (
    HEARTBEAT_SECONDS,
    VERSION,
    Event,
    Heartbeat,
    Load,
    Progress,
    Report,
)
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stream import UNREAD_EVENTS, EngineUnavailable, RequestRefused, Stream
from tests.server.fakes import Clock
from tests.waiting import PATIENCE, until_async

CONFIG = EngineConfig(max_context=256, page_size=16, max_running=8)


def load(**fields: Any) -> Load:
    return Load(**{"version": VERSION, "model": "tiny", "config": CONFIG, **fields})


async def collected(stream: Stream) -> list[int]:
    ids: list[int] = []
    while not stream.is_done:
        ids += [event.token for event in await stream.next() if event.token is not None]
    return ids


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 3 * PATIENCE))


def test_a_hanging_engine_is_told_and_replaced() -> None:
    """A stopped process gives no sign of life: all are told after 1.75 s, the next one serves."""

    async def scenario() -> None:
        stages: list[Progress] = []
        client = EngineClient(load(), on_progress=stages.append)
        await client.start()
        assert stages[0].stage == "checking that the model fits"
        folder = sockets_of(client)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        expected = await collected(client.add([5, 6], SamplingParams(max_tokens=9, seed=1)))
        with pytest.raises(RequestRefused, match="max_context = 256"):
            await client.add([5], SamplingParams(max_tokens=999)).next()
        first = client.pid
        assert first is not None
        streams = [client.add([5], SamplingParams(max_tokens=200, n=32)) for _ in range(20)]
        await streams[0].next()
        os.kill(first, signal.SIGSTOP)
        results = await asyncio.gather(*map(collected, streams), return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        assert all("no sign of life for 1.75 s" in str(result) for result in results)
        assert client.ready is None
        assert client.num_pending == 0
        assert not folder.exists()
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            client.add([5], SamplingParams())
        await until_async(lambda: client.ready is not None)
        assert client.num_restarts == 1
        assert client.pid != first
        again = await collected(client.add([5, 6], SamplingParams(max_tokens=9, seed=1)))
        assert again == expected
        await client.close()
        assert client.pid is None

    run(scenario())


def sockets_of(client: EngineClient) -> Path:
    words = Path(f"/proc/{client.pid}/cmdline").read_bytes().split(b"\0")
    return Path(words[3].decode())


def test_a_step_that_does_not_end_counts_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on, steps do not: after the limit, and not before, the engine is killed."""
    clock, stuck = Clock(), 1000.0
    monkeypatch.setattr(engine_client, "time", clock)

    async def scenario() -> None:
        worker = "tests.server.stuck_worker"
        client = EngineClient(load(), silent_seconds=1e9, stuck_seconds=stuck, worker=worker)
        await client.start()
        beats, take = list[Heartbeat](), client._take

        def seen(report: Report) -> None:
            take(report)
            if isinstance(report, Heartbeat):
                beats.append(report)

        async def pass_by(seconds: float) -> None:
            """Time, and then heartbeats, and a look at what they said."""
            clock.now += seconds
            before = len(beats)
            await until_async(lambda: len(beats) > before)
            await asyncio.sleep(2 * HEARTBEAT_SECONDS)

        client._take = seen
        for _ in range(4):
            await pass_by(0.6 * stuck)
        assert client.num_restarts == 0, "one that has nothing to do is not stuck"
        stream = client.add([5], SamplingParams())
        await until_async(lambda: beats[-1].busy)
        await pass_by(0.6 * stuck)
        assert client.num_restarts == 0 and stream.error is None
        await pass_by(0.6 * stuck)
        with pytest.raises(EngineUnavailable, match="within one step for 1000 s"):
            await stream.next()
        await client.close()

    run(scenario())


def test_an_engine_of_another_version_is_refused() -> None:
    async def scenario() -> None:
        client = EngineClient(load(model="other version"), worker="tests.server.stuck_worker")
        with pytest.raises(ValueError, match="another version"):
            await client.start()
        await client.close()

    run(scenario())


def test_an_engine_that_dies_while_loading_is_told_by_its_exit_code() -> None:
    async def scenario() -> None:
        client = EngineClient(load(model="dies"), worker="tests.server.stuck_worker")
        with pytest.raises(ValueError, match=r"while loading \(exit code 3\)"):
            await client.start()
        await client.close()

    run(scenario())


def test_a_model_that_does_not_fit_is_refused_with_the_sum() -> None:
    async def scenario() -> None:
        client = EngineClient(load(model="inkling", random_weights=True))
        with pytest.raises(ValueError, match=r"does not fit: weights [\d.]+"):
            await client.start()
        assert client.num_restarts == 0
        await client.close()

    run(scenario())


def test_an_engine_that_has_just_died_is_unavailable() -> None:
    """Between its death and the news of it, requests and aborts go nowhere, and raise nothing else;
    aborts may come twice."""

    async def scenario() -> None:
        client = EngineClient(load(), worker="tests.server.stuck_worker")
        await client.start()
        streams = [client.add([5], SamplingParams(n=3)) for _ in range(3)]
        client.kill()
        time.sleep(0.5)
        outcomes: list[Any] = []
        for _ in range(20):
            try:
                outcomes.append(client.add([5], SamplingParams()))
            except EngineUnavailable as error:
                outcomes.append(error)
        streams[0].close()
        streams[0].close()
        for stream in streams[1:]:
            with pytest.raises(EngineUnavailable):
                await stream.next()
        for outcome in outcomes:
            if isinstance(outcome, Stream):
                with pytest.raises(EngineUnavailable):
                    await outcome.next()
                outcome.close()
        streams[1].close()
        assert client.num_pending == 0
        await client.close()

    run(scenario())


def test_an_engine_that_speaks_nonsense_is_replaced() -> None:
    async def scenario() -> None:
        client = EngineClient(load(model="garbage"), worker="tests.server.stuck_worker")
        await client.start()
        await until_async(lambda: client.num_restarts)
        assert "nobody understands" in client.why_not_ready
        await client.close()
        assert client.given_up.is_set()

    run(scenario())


def test_a_client_that_is_closed_while_its_engine_starts_leaves_nothing() -> None:
    async def scenario() -> None:
        stages: list[Progress] = []
        client = EngineClient(
            load(model="loads on"), on_progress=stages.append, worker="tests.server.stuck_worker"
        )
        start = asyncio.create_task(client.start())
        await until_async(lambda: stages)
        pid, folder = client.pid, sockets_of(client)
        await client.close()
        with pytest.raises(ValueError, match=r"shutting down|loading"):
            await start
        assert not Path(f"/proc/{pid}").exists()
        assert not folder.exists()
        assert client.pid is None

    run(scenario())


def test_what_nobody_reads_ends_its_request() -> None:
    """s11: events of one request are kept up to a number; the engine is told, the reader too."""

    async def scenario() -> None:
        aborted: list[int] = []
        stream = Stream(7, 2, aborted.append)
        event = Event(7, 0, 65, "A")
        for _ in range(UNREAD_EVENTS + 1000):
            stream.push(event)
        assert aborted == [7]
        assert stream.is_behind
        assert len(await stream.next()) == UNREAD_EVENTS + 1
        with pytest.raises(EngineUnavailable, match="not read as fast"):
            await stream.next()

    run(scenario())
