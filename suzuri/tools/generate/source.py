"""Lines of a file or of stdin, read no further ahead than they are taken.

Plain reads on the file descriptor, so that the engine can go on while nothing has come, and so that
an interrupt is not held up by a reader.
"""

import os
import select
from collections.abc import Callable, Generator
from pathlib import Path

from suzuri.tools.generate.config import STDIN

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 256 << 20
"""A line may hold pictures; one longer than this is no line of prompts."""


class LineSource:
    """Numbered lines of a file, or of stdin ("-")."""

    def __init__(self, name: str) -> None:
        self.name = "stdin" if name == "-" else name
        self._fd = STDIN if name == "-" else os.open(Path(name), os.O_RDONLY)
        self._owns = name != "-"
        self._rest = b""
        self._ended = False

    def close(self) -> None:
        if self._owns:
            os.close(self._fd)
            self._owns = False

    def lines(self, may_wait: Callable[[], bool]) -> Generator[bytes | None]:
        """Each line, without its end; None when none is there and `may_wait()` is false.

        Raises ValueError for a line beyond all bounds, OSError where reading fails.
        """
        while True:
            *whole, self._rest = self._rest.split(b"\n")
            yield from whole
            if self._ended:
                if self._rest:
                    yield self._rest
                return
            if len(self._rest) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{self.name}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; put one "
                    "prompt on a line"
                )
            while not self._is_ready(None if may_wait() else 0.0):
                yield None
            self._read()

    def _is_ready(self, seconds: float | None) -> bool:
        return bool(select.select([self._fd], [], [], seconds)[0])

    def _read(self) -> None:
        """More bytes: at least one more line, or all that is there now."""
        parts = [self._rest]
        size = len(self._rest)
        while size <= MAX_LINE_BYTES:
            part = os.read(self._fd, READ_BYTES)
            if not part:
                self._ended = True
                break
            parts.append(part)
            size += len(part)
            if b"\n" in part or not self._is_ready(0.0):
                break
        self._rest = b"".join(parts)
