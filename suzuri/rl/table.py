"""What `suzuri rl` shows: a table that grows on a terminal, lines now and then elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from suzuri.training.viewers import Display

ROWS = 12
"""Steps that the table shows, the newest."""

Line = Mapping[str, Any]


def _seconds(key: str) -> Callable[[Line], str]:
    return lambda line: _number(line.get(f"time/{key}_seconds"), ".2f")


COLUMNS: dict[str, Callable[[Line], str]] = {
    "step": lambda line: str(line["step"]),
    "reward": lambda line: _number(line.get("sample/reward"), ".3f"),
    "kl max": lambda line: _number(line.get("kl/sampler_trainer_max"), ".3g"),
    "tokens": lambda line: _number(line.get("answers/tokens:mean"), ".1f"),
    "truncated": lambda line: _share(line, "answers/truncated"),
    "flat": lambda line: _share(line, "groups/flat", of="groups/count"),
    "tokens/s": lambda line: _number(line.get("time/tokens_per_s"), ",.0f"),
    "draw s": _seconds("sample"),
    "learn s": _seconds("train"),
    "publish s": _seconds("publish"),
    "held out": lambda line: _number(line.get("eval/reward"), ".3f"),
}


class RunTable:
    """The last steps of a run with their evaluations, how far it is, and how long it may take."""

    def __init__(self, console: Console) -> None:
        self._console, self._display = console, Display(console)
        self._lines: deque[Line] = deque(maxlen=ROWS)
        self._live: Live | None = None
        self._evaluation = ""

    @contextlib.contextmanager
    def running(self, what: str, total: int, done: int) -> Generator[None]:
        """While the block runs the table is shown."""
        self._total, self._first, self._begun = total, done, time.monotonic()
        if not self._console.is_terminal:
            with self._display.bar(what, total, done):
                yield
            return
        with Live(self.render(), console=self._console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                live.update(self.render(), refresh=True)
                self._live = None

    def show(self, line: Line, *, always: bool = False) -> None:
        """A step's metrics."""
        if "eval/reward" in line:
            error = _number(line.get("eval/standard_error"), ".3f")
            self._evaluation = (
                f"held out after step {line['step']}: {line['eval/reward']:.3f} +- {error}"
            )
        if line["step"]:
            self._lines.append(line)
        if self._live is not None:
            self._live.update(self.render())
        elif line["step"] and not self._console.is_terminal:
            shown = {name: cell(line) for name, cell in COLUMNS.items() if name != "step"}
            text = ", ".join(f"{name} {cell}" for name, cell in shown.items() if cell != "-")
            self._display.show(line["step"], text, always=always)

    def say(self, text: str) -> None:
        self._display.say(text)

    def render(self) -> Group:
        """The table as it is now."""
        table = Table(box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for line in self._lines:
            table.add_row(*(cell(line) for cell in COLUMNS.values()))
        return Group(table, Text(self._progress()), Text(self._evaluation))

    def _progress(self) -> str:
        done = self._lines[-1]["step"] if self._lines else self._first
        seconds = time.monotonic() - self._begun
        text = f"step {done} of {self._total}, {_clock(seconds)}"
        if (new := done - self._first) > 0:
            text += f", {_clock(seconds / new * (self._total - done))} to go"
        return text


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(line: Line, key: str, of: str = "answers/count") -> str:
    return f"{line[key] / line[of]:.0%}" if line.get(of) else "-"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
