"""Ctrl-C where it must not come in between. No torch here."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType


@contextlib.contextmanager
def interrupts_wait() -> Generator[None]:
    """Ctrl-C raises KeyboardInterrupt at the end of the block instead of within it. Where somebody
    else takes the signal, and off the main thread, nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
