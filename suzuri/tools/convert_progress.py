"""How far a conversion is: a bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Between two lines where there is no terminal: a log of a night has some hundreds."""


@contextlib.contextmanager
def shown(
    console: Console, total: int, kept: int, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[int], None]]:
    """A function to call with the bytes that are done, of `total`; `kept` ones are from before."""
    speed = _Speed(total, kept, clock)
    if not console.is_terminal:
        yield _Lines(console, speed, clock).update
        return
    columns = (
        TextColumn("writing"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=kept, speed="")

        def update(done: int) -> None:
            progress.update(task, completed=max(done, kept), speed=speed.text(done))

        yield update


class _Speed:
    """The average since the start, without what an earlier run had done."""

    def __init__(self, total: int, kept: int, clock: Callable[[], float]) -> None:
        self.total, self._kept, self._clock = total, kept, clock
        self._start = clock()

    def rate(self, done: int) -> float:
        """Bytes per second."""
        return max(done - self._kept, 0) / max(self._clock() - self._start, 1e-9)

    def text(self, done: int) -> str:
        return f"{self.rate(done) / 1e6:.1f} MB/s"


class _Lines:
    def __init__(self, console: Console, speed: _Speed, clock: Callable[[], float]) -> None:
        self._console, self._speed, self._clock = console, speed, clock
        self._last = clock()

    def update(self, done: int) -> None:
        now = self._clock()
        if now - self._last < LINE_SECONDS:
            return
        self._last = now
        speed, total = self._speed, self._speed.total
        rate = speed.rate(done)
        left = f", about {_duration((total - done) / rate)} left" if rate else ""
        self._console.print(
            f"writing: {done / 1e9:.1f} of {total / 1e9:.1f} GB ({100 * done // max(total, 1)}%), "
            f"{speed.text(done)}{left}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
