"""A command at a terminal of its own, typed at and read like a person would."""

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
PAUSE, END_SECONDS, PRESSES = 3.0, 20.0, 20


class Terminal:
    """`python -m suzuri WORDS` with a terminal as stdin, stdout and stderr; or stdout a file."""

    def __init__(self, *words: str, out: Path | None = None) -> None:
        self._leader, terminal = pty.openpty()
        self.screen = ""
        self._seen = 0
        self._bytes = b""

        def take_terminal() -> None:
            # Ctrl-C goes to whoever the terminal belongs to.
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        with open(out or os.devnull, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "suzuri", *words],
                cwd=ROOT,
                env=environment,
                stdin=terminal,
                stdout=terminal if out is None else file,
                stderr=terminal,
                start_new_session=True,
                preexec_fn=take_terminal,  # noqa: PLW1509 (no threads of ours hold locks)
            )
        os.close(terminal)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._leader)

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def expect(self, text: str) -> str:
        """Waits for a text after the last one that was waited for; what came up to its end."""
        deadline = time.monotonic() + SECONDS
        while (place := self.screen.find(text, self._seen)) < 0:
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"no {text!r} in {self.screen[self._seen :]!r}")
        start, self._seen = self._seen, place + len(text)
        return self.screen[start : self._seen]

    def press_until(self, key: str, text: str) -> None:
        """Presses a key now and then until a text comes: readline loses one while it starts."""
        for _ in range(PRESSES):
            self.type(key)
            deadline = time.monotonic() + PAUSE
            while self._read(deadline):
                if self.screen.find(text, self._seen) >= 0:
                    self.expect(text)
                    return
        raise AssertionError(f"no {text!r} in {self.screen[self._seen :]!r}")

    def press_to_end(self, key: str) -> int:
        """Presses a key now and then until the command ends; its exit code. One that comes while
        Python shuts down would end it by the signal, so the pauses are long."""
        for _ in range(PRESSES):
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(END_SECONDS)
        raise AssertionError(f"it goes on: {self.screen[self._seen :]!r}")

    def end(self) -> int:
        """Reads on until the command has ended; its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(SECONDS)

    def _read(self, deadline: float) -> bool:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._leader], [], [], left)[0]:
            return False
        try:
            data = os.read(self._leader, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self._bytes += data
        self.screen = self._bytes.decode("utf-8", "replace")
        return bool(data)
