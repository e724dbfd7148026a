"""Encoding and rendering in processes of their own, so that the HTTP loop stays responsive.

`Texts.ask` gives a question to the process with the shortest queue. A process that dies, or takes
longer than its limit, is replaced; only the question that it had is lost.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from suzuri.log import get_logger
from suzuri.server.text_messages import (
    LENGTH_BYTES,
    Answer,
    Encode,
    Prompts,
    Question,
    Render,
    Setup,
    Table,
    Wrong,
    framed,
)

WORKER = "suzuri.server.text_worker"
START_SECONDS = 120.0
"""Of a process that takes the place of another."""

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

    async def ask(self, question: Encode | Render) -> Prompts:
        """Raises TextRefused for what cannot be used, TextUnavailable when a process failed."""
        worker = min(self._workers, key=lambda worker: worker.num_waiting)
        return await worker.ask(question)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _TextProcess:
    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: Process | None = None
        self._setup: Setup | None = None
        self._lock = asyncio.Lock()
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self.num_waiting = 0

    async def launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", WORKER),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which drains first
        )

    async def set_up(self, setup: Setup) -> Table:
        self._setup = setup
        answer = await self._exchange(setup)
        assert isinstance(answer, Table)
        return answer

    async def ask(self, question: Encode | Render) -> Prompts:
        self.num_waiting += 1
        try:
            await self._lock.acquire()
            task = asyncio.create_task(self._answer(question))
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

    async def _answer(self, question: Question) -> Answer:
        try:
            return await asyncio.wait_for(self._exchange(question), self._limit)
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            why = f"took over {self._limit:g} s" if isinstance(error, TimeoutError) else "ended"
            log.warning("a text process %s; it is replaced", why)
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                await self._replace()
            raise TextUnavailable(
                f"the process that encodes and renders {why} over this request"
            ) from error

    async def _replace(self) -> None:
        await self.close()
        await self.launch()
        if self._setup is not None:
            await asyncio.wait_for(self._exchange(self._setup), START_SECONDS)

    async def _exchange(self, question: Question) -> Answer:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        if process.returncode is not None or process.stdin.is_closing():
            raise EOFError  # uvloop raises a RuntimeError for what is written to it
        process.stdin.write(framed(question))
        await process.stdin.drain()
        head = await process.stdout.readexactly(LENGTH_BYTES)
        return self._decode(await process.stdout.readexactly(int.from_bytes(head, "little")))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
