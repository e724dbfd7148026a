"""Functions called in processes of their own, which are ended when a call takes too long.

A thread cannot be ended and a signal needs the main thread, so whatever may not end (a grader over
text that a model wrote, somebody's reward function) is called here. No torch.
"""

# pyright: strict

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

START_SECONDS = 120.0
"""What starting and importing may take on a busy machine."""
MOST_BYTES = 1 << 26
"""Of an answer."""


class WorkerError(Exception):
    """What a function raised, in words, or how its process ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Of one call: seconds of processor time (None: any number), which do not depend on what else
    runs, and of wall time, waiting for a free process not counted."""

    cpu_seconds: float | None = 5.0
    wall_seconds: float = 25.0


class Workers:
    """Up to `count` processes, started when they are needed and used again. In each `modules` are
    imported first; then it may take `memory_mb` of address space (None: any).

    Their hashes are the same every time, so what a function makes of a set is, too. They end with
    this object, with this process, and when a call breaks a limit.
    """

    def __init__(
        self, modules: Sequence[str] = (), *, count: int = 2, memory_mb: int | None = 4096
    ) -> None:
        memory = None if memory_mb is None else memory_mb << 20
        self._greeting = {"modules": list(modules), "memory": memory}
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "suzuri-workers")
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle, self._threads)

    async def call(self, path: str, *arguments: Any, limits: CallLimits | None = None) -> Any:
        """What the function at "package.module:name" makes of JSON values: a JSON value. Raises
        TimeoutError beyond the limits, WorkerError with what it raised."""
        return await asyncio.wrap_future(self.begin(path, *arguments, limits=limits))

    def begin(
        self, path: str, *arguments: Any, limits: CallLimits | None = None
    ) -> "concurrent.futures.Future[Any]":
        """`call`, for several that wait for one, each in an event loop of its own."""
        return self._threads.submit(self._call, path, arguments, limits or CallLimits())

    def call_now(self, path: str, *arguments: Any, limits: CallLimits | None = None) -> Any:
        """`call`, for where nothing else waits."""
        return self._call(path, arguments, limits or CallLimits())

    def _call(self, path: str, arguments: Sequence[Any], limits: CallLimits) -> Any:
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self._greeting)
        call = {
            "call": path,
            "arguments": arguments,
            "cpu": limits.cpu_seconds,
            "wall": limits.wall_seconds + 1,  # ends it where nobody watches any more
        }
        answer = process.answer(call, limits.wall_seconds)
        self._idle.append(process)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]


class _Process:
    """One that was greeted. It ends with the first call that it does not answer."""

    def __init__(self, greeting: dict[str, Any]) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        settings = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        settings |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self._child = subprocess.Popen(
            [
                *("env", *(f"{name}={value}" for name, value in settings.items())),
                *(sys.executable, "-m", "suzuri.envs.worker"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not stopped by a Ctrl-C that is meant for the run.
            start_new_session=True,
        )
        self.answer(greeting, START_SECONDS)

    def answer(self, said: dict[str, Any], seconds: float) -> dict[str, Any]:
        found: dict[str, Any] | None = None
        try:
            found = self._answer(said, seconds)
            return found
        finally:
            if found is None:
                self.end()

    def _answer(self, said: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(said).encode() + b"\n")
            self._child.stdin.flush()
        end = time.monotonic() + seconds
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not selector.select(max(end - time.monotonic(), 0)):
                    raise TimeoutError(f"took more than {seconds:g} s")
                piece = os.read(self._child.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended(said.get("cpu"))
                found += piece
                if len(found) > MOST_BYTES:
                    raise WorkerError(f"answered more than {MOST_BYTES} bytes")
        return json.loads(found)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ended(self, cpu: float | None) -> Exception:
        code = self._child.wait()
        if code == -signal.SIGPROF:
            return TimeoutError(f"took more than {cpu:g} s of processor time")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(f"its process ended ({how})")


def _end_all(idle: list[_Process], threads: concurrent.futures.ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while idle:
        idle.pop().end()
