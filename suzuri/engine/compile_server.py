"""The process that compiles kernels for another one, on many cores and without a GPU.

Started by compilation.py as `python -m suzuri.engine.compile_server`. It imports what kernels
need while its parent still reads weights, then takes one line of JSON (see `Order`), and forks a
process for each core. What they compile goes to Triton's cache on disk, where the parent finds it.
One line of JSON comes back per kernel: {"index", "cached", "error"}.
"""

# Triton's classes come without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from suzuri.engine.kernel_keys import settle
from suzuri.engine.launches import TRITON_ERRORS


class Order(TypedDict):
    """`target`: backend, architecture, warp size; `cache`: Triton's folder; `kernels`: module,
    name, Triton's description of each."""

    target: tuple[str, Any, int]
    cache: str
    processes: int
    kernels: list[tuple[str, str, str]]


class NoDriver:
    """What Triton asks of a driver to compile for a GPU that it must not touch."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def function_named(module: str, name: str) -> Any:
    """The jit function of a specialization."""
    return getattr(importlib.import_module(module), name)


def compile_one(job: tuple[int, tuple[str, str, str]]) -> str:
    """Compiles a kernel, or finds it on disk; the line that says so."""
    index, (module, name, data) = job
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = listen
    error = None
    try:
        function_named(module, name).preload(data)
    except TRITON_ERRORS as problem:
        error = f"{type(problem).__name__}: {problem}"
    return json.dumps({"index": index, "cached": all(hits), "error": error})


def serve(order: Order, say: Callable[[str], object]) -> None:
    """Compiles everything in the order; the largest kernels are not known, so one at a time."""
    stand_in: Any = NoDriver(GPUTarget(*order["target"]))
    driver.set_active(stand_in)
    knobs.cache.dir = order["cache"]
    for module in {module for module, _, _ in order["kernels"]}:
        importlib.import_module(module)  # once, before the processes part
    settle()
    jobs = list(enumerate(order["kernels"]))
    context = multiprocessing.get_context("fork")
    with context.Pool(max(1, min(order["processes"], len(jobs)))) as pool:
        for line in pool.imap_unordered(compile_one, jobs):
            say(line)


def main() -> None:
    line = sys.stdin.readline()
    if not line.strip():
        return  # the parent has gone, or needs nothing
    serve(json.loads(line), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
