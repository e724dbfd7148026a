"""Running somebody else's code: an environment's, a tool's, a sampler's. No torch here."""

# pyright: strict

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Fault(Exception):
    """What went wrong, in words. `status`: "timed_out" or "failed"."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


async def guarded(call: Coroutine[Any, Any, Result], seconds: float | None) -> Result:
    """The result of a call. What it raises, whatever it is, becomes a `Fault`, for it is anybody's
    code and its errors are no reason to stop; so does taking more than `seconds`."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise Fault("timed_out", f"took more than {seconds} s")
    error = task.exception()
    if error is not None:
        raise Fault("failed", f"{type(error).__name__}: {error}") from error
    return task.result()
