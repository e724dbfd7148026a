"""Encoding and rendering in processes of their own, so that the HTTP loop stays responsive.

`Texts.ask` gives a question to the process with the shortest queue. A process that dies, gives no
sign of life or takes longer than its limit is replaced at once; only the question that it had is
lost.
"""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process

import msgspec

from suzuri.log import get_logger
from suzuri.server.text_messages import (
    LENGTH_BYTES,
    Answer,
    Beat,
    Encode,
    Prompts,
    Question,
    Render,
    Said,
    Setup,
    Table,
    Wrong,
    framed,
)

WORKER = "suzuri.server.text_worker"
START_SECONDS = 120.0
"""Of a process that takes the place of another."""
LOOK_SECONDS = 0.25
QUIET_SECONDS = 1.25
"""Without a sign of life: no request should come now."""
DEAD_SECONDS = 5.0
"""Without a sign of life: it is replaced. A large body alone may keep it quiet for a moment."""
LONGEST_PAUSE = 30.0

log = get_logger(__name__)


class TextUnavailable(Exception):
    """A text process died or took too long over this question."""


class TextRefused(ValueError):
    """The text or conversation cannot be used; what to change is in the text."""


class Texts:
    """`count` processes; `limit` in seconds is what one question may take."""

    def __init__(self, *, count: int = 1, limit: float = 60.0) -> None:
        self._workers = [_TextProcess(limit) for _ in range(count)]
        self.token_bytes: list[bytes] = []
        """The bytes of every id, once set up."""

    async def launch(self) -> None:
        """Start the processes; they load while the engine does."""
        await asyncio.gather(*(worker.launch() for worker in self._workers))

    async def set_up(self, setup: Setup) -> None:
        tables = await asyncio.gather(*(worker.set_up(setup) for worker in self._workers))
        self.token_bytes = tables[0].token_bytes

    @property
    def why_not_ready(self) -> str | None:
        """None while a process is there that answers."""
        if any(worker.is_ready for worker in self._workers):
            return None
        return "the process that encodes and renders does not answer; it is being replaced"

    async def ask(self, question: Encode | Render) -> Prompts:
        """Raises TextRefused for what cannot be used, TextUnavailable when a process failed."""
        worker = min(self._workers, key=lambda worker: (not worker.is_ready, worker.num_waiting))
        return await worker.ask(question)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _TextProcess:
    """One process after the other; from `set_up` on a task watches and replaces them."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._decode = msgspec.msgpack.Decoder(Said).decode
        self._up = asyncio.Event()
        self._last_beat = 0.0
        self._is_quiet = False
        self._asked = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        """To the question that it has, since `_asked`."""
        self._task: asyncio.Task[None] | None = None
        self.num_waiting = 0

    @property
    def is_ready(self) -> bool:
        return self._up.is_set() and not self._is_quiet

    async def launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", WORKER),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which drains first
        )

    async def set_up(self, setup: Setup) -> Table:
        table = await self._load(setup)
        self._task = asyncio.create_task(self._supervise(setup))
        return table

    async def _load(self, setup: Setup) -> Table:
        await self._send(framed(setup))
        answer = await self._receive()
        assert isinstance(answer, Table)
        self._last_beat, self._is_quiet = time.monotonic(), False
        self._up.set()
        return answer

    # Questions

    async def ask(self, question: Encode | Render) -> Prompts:
        self.num_waiting += 1
        try:
            await self._lock.acquire()
            task = asyncio.create_task(self._exchange(question))
            task.add_done_callback(self._answered)
            # Shielded: a caller that goes away must not leave half an exchange behind.
            answer = await asyncio.shield(task)
        finally:
            self.num_waiting -= 1
        match answer:
            case Prompts():
                return answer
            case Wrong(error):
                raise TextRefused(error)
            case Table():
                raise TextUnavailable("a text process answered another question")

    def _answered(self, task: asyncio.Task[Answer]) -> None:
        self._lock.release()
        if not task.cancelled():
            task.exception()  # seen, even if the caller is gone

    async def _exchange(self, question: Question) -> Answer:
        try:
            await asyncio.wait_for(self._up.wait(), self._limit)
        except TimeoutError:
            raise TextUnavailable("no process that encodes and renders could be started") from None
        data = framed(question)  # first, as it may raise
        self._asked = time.monotonic()
        self._answer = answer = asyncio.get_running_loop().create_future()
        sending = asyncio.create_task(self._send(data))
        try:
            return await answer
        finally:
            self._answer = None
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    # Life

    async def _supervise(self, setup: Setup) -> None:
        while True:
            self._lost(await self._one_life())
            failures = 0
            while not self._up.is_set():
                await self._kill()
                try:
                    await self.launch()
                    await asyncio.wait_for(self._load(setup), START_SECONDS)
                except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                    failures += 1
                    pause = min(LONGEST_PAUSE, 0.1 * 4**failures)
                    log.warning("a text process does not start (%r); again in %g s", error, pause)
                    await asyncio.sleep(pause)

    def _lost(self, why: str) -> None:
        """Turn readiness off and tell the one who waits."""
        self._up.clear()
        log.warning("a text process %s; it is replaced", why)
        if self._answer is not None and not self._answer.done():
            what = f"the process that encodes and renders {why} over this request"
            self._answer.set_exception(TextUnavailable(what))

    async def _one_life(self) -> str:
        """Follow the process to its end; why it ended."""
        tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> str:
        try:
            while True:
                said = await self._receive()
                self._last_beat = time.monotonic()
                if isinstance(said, Beat):
                    continue
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(said)
        except (OSError, EOFError):
            return "ended"
        except msgspec.DecodeError:
            return "said what nobody understands"

    async def _watch(self) -> str:
        """Ends when the process gives no sign of life, or takes too long over a question."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > 4 * LOOK_SECONDS:
                self._last_beat = now  # this loop was held up itself and has read nothing
            looked = now
            self._is_quiet = now - self._last_beat > QUIET_SECONDS
            if now - self._last_beat > DEAD_SECONDS:
                return f"gave no sign of life for {DEAD_SECONDS:g} s"
            if self._answer is not None and now - self._asked > self._limit:
                return f"took over {self._limit:g} s"

    async def _send(self, data: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise EOFError
        if process.returncode is not None or process.stdin.is_closing():
            raise EOFError  # uvloop raises a RuntimeError for what is written to it
        process.stdin.write(data)
        await process.stdin.drain()

    async def _receive(self) -> Said:
        process = self._process
        if process is None or process.stdout is None:
            raise EOFError
        head = await process.stdout.readexactly(LENGTH_BYTES)
        return self._decode(await process.stdout.readexactly(int.from_bytes(head, "little")))

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # With an answer in it that nobody reads, asyncio would never see the end.
        while process.stdout is not None and await process.stdout.read(1 << 16):
            pass
        await process.wait()
