"""Time of one call of an op.

On a GPU: replays of a CUDA graph over several sets of inputs, so that nothing sits in L2 and no
launch is waited for; an op that waits for the device itself is timed by events around each call,
after a flush of L2. On a CPU: the clock. Medians throughout.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from suzuri.engine.devices import device_named

L2_BYTES = 400 << 20
"""Inputs of a graph together have at least so many bytes, or MOST_SETS sets."""
FLUSH_BYTES = 1 << 28
MOST_SETS, LEAST_SETS = 64, 2
MOST_BYTES = 24 << 30
WARM = 2
Call = Callable[[], object]


class Timed(NamedTuple):
    """Microseconds of a call, and how they were found: graph, events or clock."""

    us: float
    how: str


def time_calls(calls: Sequence[Call], device: torch.device, repeats: int) -> Timed:
    """The median time of one of `calls`, each with inputs of its own."""
    for call in calls[:WARM]:
        call()
    if device.type != "cuda":
        return Timed(clock_us(calls, repeats), "clock")
    if waits_for_device(calls[0], device):
        return Timed(events_us(calls[0], device, repeats), "events")
    return Timed(graph_us(calls, device, repeats), "graph")


def waits_for_device(call: Call, device: torch.device) -> bool:
    """Whether a call makes the host wait, so that no graph can hold it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def needed_gpu() -> torch.device:
    """The GPU that a script measures. SystemExit with what is in its way."""
    try:
        return device_named("cuda", f"{Path(sys.argv[0]).stem}: needs a GPU")
    except ValueError as error:
        raise SystemExit(str(error)) from None


def graph_us(calls: Sequence[Call], device: torch.device, repeats: int) -> float:
    """Per call, of a graph that holds all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = _events()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def events_us(call: Call, device: torch.device, repeats: int) -> float:
    """Each call alone, after a flush of L2; the host's launches count where they are slower."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    times: list[float] = []
    for _ in range(WARM + repeats):
        flush.zero_()
        begin, end = _events()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[WARM:])


def clock_us(calls: Sequence[Call], repeats: int) -> float:
    """Per call, on a CPU."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append(1e6 * (time.perf_counter() - start) / len(calls))
    return statistics.median(times)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return begin, end


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of arguments or results: in dicts, lists, tuples, and dataclasses' fields."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for item in value.values() for x in tensors_in(item)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [x for item in value for x in tensors_in(item)]  # pyright: ignore[reportUnknownVariableType]
    if _has_fields(value):
        fields = cast(dict[str, Any], vars(value))
        return [x for item in fields.values() for x in tensors_in(item)]
    return []


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def bytes_of(value: Any) -> int:
    """Bytes of all tensors of arguments or results."""
    return sum(x.numel() * x.element_size() for x in tensors_in(value))


def copied(value: Any) -> Any:
    """Arguments with tensors of their own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # pyright: ignore[reportUnknownArgumentType]
        return type(value)(*map(copied, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if _has_fields(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: copied(getattr(value, name)) for name in names})
    return value


def sets_of(given: Any, device: torch.device) -> list[Any]:
    """As many copies of the arguments as it takes to leave none in L2."""
    size = max(bytes_of(given), 1)
    if device.type != "cuda":
        return [given]
    number = min(MOST_SETS, max(LEAST_SETS, -(-L2_BYTES // size)), max(1, MOST_BYTES // size))
    return [given, *(copied(given) for _ in range(number - 1))]
