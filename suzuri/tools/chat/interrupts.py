"""Ctrl-C where it must not come in between. No torch."""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType


@contextlib.contextmanager
def interrupts_wait() -> Generator[None]:
    """Ctrl-C is raised at the end of the block instead of within it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
