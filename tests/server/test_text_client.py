"""Text processes that stop, die or take too long: known at once, and replaced (a09)."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from suzuri.model.config import preset
from suzuri.server import text_client
from suzuri.server.text_client import Texts, TextUnavailable
from suzuri.server.text_messages import Encode, Setup, framed
from tests.waiting import PATIENCE, until_async


def run(scenario: Callable[[Texts, int], Coroutine[Any, Any, None]], **fields: Any) -> None:
    """With the id of the only process."""

    async def main() -> None:
        texts = Texts(**fields)
        await texts.launch()
        await texts.set_up(Setup(config=preset("tiny"), max_tokens=1_000_000))
        try:
            assert texts.why_not_ready is None
            await scenario(texts, process_of(texts))
        finally:
            await texts.close()

    asyncio.run(asyncio.wait_for(main(), 3 * PATIENCE))


def process_of(texts: Texts) -> int:
    (worker,) = texts._workers
    assert worker._process is not None
    return worker._process.pid


def test_one_that_stops_is_known_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_client, "DEAD_SECONDS", 2.5)

    async def scenario(texts: Texts, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(texts.ask(Encode(["x"])))
        await until_async(lambda: texts.why_not_ready is not None)
        assert not asked.done()
        with pytest.raises(TextUnavailable, match=r"no sign of life for 2\.5 s over this request"):
            await asked
        await until_async(lambda: texts.why_not_ready is None)
        assert process_of(texts) != pid
        assert len((await texts.ask(Encode(["x"]))).ids) == 1

    run(scenario)


def test_one_that_goes_on_in_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_client, "DEAD_SECONDS", 3600.0)

    async def scenario(texts: Texts, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(texts.ask(Encode(["x"])))
        await until_async(lambda: texts.why_not_ready is not None)
        os.kill(pid, signal.SIGCONT)
        assert len((await asked).ids) == 1
        await until_async(lambda: texts.why_not_ready is None)
        assert process_of(texts) == pid

    run(scenario)


def test_one_that_dies_is_replaced_unasked() -> None:
    async def scenario(texts: Texts, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: texts.why_not_ready is not None)
        late = asyncio.create_task(texts.ask(Encode(["x"])))  # let in before, and waits
        await until_async(lambda: texts.why_not_ready is None)
        assert process_of(texts) != pid
        assert len((await late).ids) == 1

    run(scenario)


def test_a_question_that_takes_too_long_is_lost_alone() -> None:
    async def scenario(texts: Texts, pid: int) -> None:
        slow = asyncio.create_task(texts.ask(Encode(["some words " * 50_000] * 200)))
        with pytest.raises(TextUnavailable, match=r"took over 0\.2 s over this request"):
            await slow
        await until_async(lambda: texts.why_not_ready is None)
        assert process_of(texts) != pid

    run(scenario, limit=0.2)


def test_one_whose_answer_nobody_reads_is_ended_all_the_same() -> None:
    """More of it than is kept: nothing reads on, and no end is seen unless somebody does."""

    async def scenario(texts: Texts, pid: int) -> None:
        (worker,) = texts._workers
        assert worker._task is not None and worker._process is not None
        worker._task.cancel()
        await worker._send(framed(Encode(["x y " * 200_000])))
        kept: Any = worker._process.stdout
        await until_async(lambda: len(kept._buffer) > 1 << 17)
        await texts.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario)
