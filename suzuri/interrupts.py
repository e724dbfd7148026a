"""Ctrl-C where it must not come in between. No torch here."""

import contextlib
import dataclasses
import os
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


@dataclasses.dataclass
class Interrupt:
    """Whether somebody asked to stop."""

    asked: bool = False


STOPPED = 130
"""Exit code of a run that somebody stopped."""


@contextlib.contextmanager
def asked_to_stop(what: str) -> Generator[Interrupt]:
    """Within the block the first Ctrl-C (or SIGTERM) asks to stop and says `what` happens now, the
    second leaves at once. Off the main thread nobody can ask."""
    found = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if found.asked:
            # Threads that write a state would be waited for; what is half written is no state.
            os._exit(STOPPED)
        found.asked = True
        with contextlib.suppress(OSError):
            os.write(2, f"\n{what}; once more leaves at once\n".encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
