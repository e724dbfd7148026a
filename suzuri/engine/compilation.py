"""Compiles noted kernels (launches.py) on all cores, and loads them into this process.

Triton's front end is Python, which threads would take turns in: `Compiler` has another process do
it (compile_server.py), which forks one per core. It may be started long before there is anything to
compile, to be ready then. Whatever goes wrong there, `load` compiles here, only slower.
"""

# Triton's classes come without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from suzuri.engine.kernel_keys import settle
from suzuri.engine.launches import TRITON_ERRORS, Specialization

Show = Callable[[int, int], None]
"""(done, total)."""
SECONDS = 300.0
"""For all kernels; a process that takes longer has gone wrong."""


@dataclasses.dataclass
class Outcome:
    """How many kernels were compiled, how many were found on disk, and what is wrong with the
    others, by name; `names` of those that were compiled."""

    compiled: int = 0
    cached: int = 0
    names: set[str] = dataclasses.field(default_factory=set[str])
    problems: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class Compiler:
    """The process that compiles; `close` ends it. Used once."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "suzuri.engine.compile_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
            )
        except OSError as error:
            self.problem = str(error)

    def compile(self, kernels: Sequence[Specialization], show: Show | None = None) -> Outcome:
        """Compiles into Triton's cache on disk what is not there."""
        found, done, total = Outcome(), 0, len(kernels)
        if self._process is None or not kernels:
            return found
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        active: Any = driver.active
        target = active.get_current_target()
        order = {
            "target": (target.backend, target.arch, target.warp_size),
            "cache": knobs.cache.dir,
            "processes": cores(),
            "kernels": [(kernel.module, kernel.name, kernel.data) for kernel in kernels],
        }
        timer = threading.Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.close()
            for line in self._process.stdout:
                answer: dict[str, Any] = json.loads(line)
                done += 1
                name = str(kernels[answer["index"]].name)
                if answer["error"] is not None:
                    found.problems[name] = answer["error"]
                elif answer["cached"]:
                    found.cached += 1
                else:
                    found.compiled += 1
                    found.names.add(name)
                if show is not None:
                    show(done, total)
        except (OSError, ValueError) as error:
            self.problem = str(error)
        finally:
            timer.cancel()
        if done < total and self.problem is None:
            self.problem = f"it ended after {done} of {total} kernels"
        return found

    def close(self) -> None:
        """Ends the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it may have ended with something unread
                    pipe.close()
        try:
            # With those that it forked.
            os.killpg(process.pid, 9)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait()


def load(
    kernels: Sequence[Specialization], device: torch.device, show: Show | None = None
) -> Outcome:
    """Makes this process ready to launch the kernels: reads them from disk, or compiles those that
    are not there, builds what launches them, and brings them onto the GPU."""
    found, total = Outcome(), len(kernels)
    before = knobs.compilation.listener
    lock, here = threading.Lock(), threading.local()

    def listen(*, cache_hit: bool, **words: Any) -> None:
        here.compiles = bool(here.compiles) or not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **words)

    # Threads begin on the first GPU; launches are made on the one that is current here.
    on_gpu = device.type == "cuda"
    place = torch.cuda.current_device() if on_gpu else -1

    def load_one(kernel: Specialization) -> None:
        here.compiles = None
        with torch.cuda.device(place) if on_gpu else contextlib.nullcontext():
            compiled = kernel.function.preload(kernel.data)
            with lock:
                if here.compiles:
                    found.compiled += 1
                    found.names.add(kernel.name)
                elif here.compiles is not None:
                    found.cached += 1
            if compiled is not None and on_gpu:
                _ = compiled.run  # builds the launcher and loads the binary

    settle()
    knobs.compilation.listener = listen
    try:
        with ThreadPoolExecutor(min(16, cores()), "load-kernels") as pool:
            tasks = {pool.submit(load_one, kernel): kernel for kernel in kernels}
            for done, task in enumerate(as_completed(tasks), 1):
                try:
                    task.result()
                except TRITON_ERRORS as error:
                    found.problems[tasks[task].name] = f"{type(error).__name__}: {error}"
                if show is not None:
                    show(done, total)
    finally:
        knobs.compilation.listener = before
    return found
