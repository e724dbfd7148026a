"""Running somebody else's code: an environment's, a tool's, a sampler's. No torch here.

`guarded` is for code that gives way, `Stage` for code that may never do so.
"""

# pyright: strict

import asyncio
import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from suzuri.types import SamplerLost

Result = TypeVar("Result")

GRACE = 1.0
"""Seconds between asking what took too long to end and breaking it off."""
RETRY = 0.05
"""Seconds between attempts to start a thread where the system allows no more."""


class Fault(Exception):
    """What went wrong, in words. `status`: "timed_out" or "failed"."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class BrokenOff(BaseException):
    """Raised within code that took too long, wherever it is."""


async def guarded(call: Coroutine[Any, Any, Result], seconds: float | None) -> Result:
    """The result of a call. What it raises, whatever it is, becomes a `Fault`, for it is anybody's
    code and its errors are no reason to stop; so does taking more than `seconds`. SamplerLost
    passes."""
    task = asyncio.ensure_future(call)
    try:
        return await _result(task, seconds)
    except Fault as fault:
        if isinstance(fault.__cause__, SamplerLost):
            raise fault.__cause__ from None
        raise
    finally:
        task.cancel()


async def _result(task: "asyncio.Future[Result]", seconds: float | None) -> Result:
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        raise Fault("timed_out", f"took more than {seconds} s")
    if task.cancelled():
        raise Fault("failed", "CancelledError: it cancelled itself")
    error = task.exception()
    if error is not None:
        raise Fault("failed", f"{type(error).__name__}: {error}") from error
    return task.result()


class Stage:
    """A thread with an event loop of its own, for the environment of one attempt: code that never
    gives way, or never returns, holds up nobody else. All calls of an attempt run here, so that
    what one opens the next may use.

    A call that takes too long is left alone: what it awaits is cancelled, and after a moment an
    exception is raised in the middle of it. Code that sits in a call of the system for ever costs a
    sleeping thread, which does not keep the process from ending.
    """

    @classmethod
    async def opened(cls, seconds: float) -> "Stage":
        """A new one. Where the system has no room for one more thread or file, as soon as there is,
        for at most `seconds`; then a `Fault`."""
        end = time.monotonic() + seconds
        while True:
            try:
                return cls()
            except (OSError, RuntimeError) as error:
                _raise_limit()
                if time.monotonic() > end:
                    raise Fault("failed", f"no thread for an environment: {error}") from error
            await asyncio.sleep(RETRY)

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="suzuri-env", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    async def run(self, call: Callable[[], Awaitable[Result]], seconds: float) -> Result:
        """As `guarded`; after a fault of time the stage is closed."""
        if self._is_closed:
            raise Fault("failed", "the call before took too long and may still run")
        future = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_without_exits(call), self._loop)
        )
        try:
            return await _result(future, seconds)
        finally:
            if not future.done():
                future.cancel()
                self.close()
                self._break_off_later()

    def close(self) -> None:
        """Ends the thread once what runs there gives way."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._end.set)

    def _run(self) -> None:
        with (
            contextlib.suppress(BrokenOff),
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            runner.run(self._wait())

    async def _wait(self) -> None:
        await self._end.wait()

    def _break_off_later(self) -> None:
        """On a thread of its own: the loop that asks may end first, and a thread that spins takes
        every other thread's turns for as long as the process lives."""
        timer = threading.Timer(GRACE, self._break_off)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no room for one more thread
            asyncio.get_running_loop().call_later(GRACE, self._break_off)

    def _break_off(self) -> None:
        ident = self._thread.ident
        if self._thread.is_alive() and ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(BrokenOff)
            )


async def _without_exits(call: Callable[[], Awaitable[Result]]) -> Result:
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _raise_limit() -> None:
    """As many open files as the system lets this user have; an event loop takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
