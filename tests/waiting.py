"""Waiting for what other tasks, threads and processes do. A deadline only ends a test that hangs.

What has to happen is asked for again and again: a time that is usually enough fails on a busy
machine, and one that always is wastes time on every other.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE = 120.0
"""Seconds; far more than a busy machine takes for anything that a test waits for."""
PAUSE = 0.01


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Waits for a condition; AssertionError when it does not come."""
    for _ in _looks(condition, seconds):
        time.sleep(PAUSE)


async def until_async(condition: Callable[[], object]) -> None:
    """`until`, while the other tasks of the loop run."""
    for _ in _looks(condition, PATIENCE):
        await asyncio.sleep(PAUSE)


def _looks(condition: Callable[[], object], seconds: float) -> Iterator[None]:
    """One for each time that the condition was not there."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        yield
