"""What a chat shows: answers as they come, notes, errors, and a sign of life during waits.

On a terminal thoughts and notes are dim. Where the output goes elsewhere, it has the answers alone,
and the rest goes to stderr. Nothing is read as markup, and no control character gets out.
"""

import contextlib
from collections.abc import Generator
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from suzuri.processing.chat_output import Piece

DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"<{code:02x}>" for code in range(0x80, 0xA0)},
    **{code: f"<{code:04x}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    **{code: "\ufffd" for code in range(0xD800, 0xE000)},
}


def clean(text: str) -> str:
    """The text with control characters, but for tabs and line ends, as pictures of themselves;
    likewise those that reorder a line, and halves of surrogate pairs."""
    return text.translate(_SHOWN)


class Display:
    """out: where answers go. err: where the rest goes, unless out is a terminal; may be out."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._main = _Stream(out)
        self._side = self._main if out.isatty() or err is out else _Stream(err)
        self._console = Console(file=out if out.isatty() else err)
        self._last = ""
        """What kind of block is open."""

    def show(self, pieces: list[Piece]) -> None:
        """More of an answer."""
        for piece in pieces:
            match piece.kind:
                case "reasoning":
                    self._begin("reasoning", piece.index, self._side)
                    self._side.write(piece.text, DIM)
                case "content":
                    self._begin("content", piece.index, self._main)
                    self._main.write(piece.text)
                case "tool_start":
                    self._begin("call", piece.index, self._main)
                    self._main.write(f"call {piece.name} ", BOLD)
                case "tool_arguments":
                    self._main.write(piece.text)
                case "tool_end":
                    self._main.end_line()

    def _begin(self, kind: str, index: int, stream: "_Stream") -> None:
        block = f"{kind} {index}"
        if block != self._last:
            stream.end_line()
            if self._last.startswith("reasoning") and stream.is_terminal:
                stream.write("\n")
        self._last = block

    def end(self) -> None:
        """The answer is over."""
        self._main.end_line()
        self._side.end_line()
        self._last = ""

    def interrupted(self) -> None:
        """Ctrl-C has been echoed wherever the line was."""
        if self._side.is_terminal:
            self._side.write("\n")
        self.end()

    def note(self, text: str) -> None:
        """A line about what happened."""
        self._side.end_line()
        self._side.write(f"{text}\n", DIM)

    def text(self, text: str) -> None:
        """What was asked for by a command."""
        self._side.end_line()
        self._side.write(f"{text}\n")

    def error(self, text: str) -> None:
        self._side.end_line()
        self._side.write("error: ", RED)
        self._side.write(f"{text}\n")

    @contextlib.contextmanager
    def waiting(self, text: str) -> Generator["Wait"]:
        """Shows a spinner with the text and the time until `stop`, where there is a terminal."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, style="dim"),
            TimeElapsedColumn(),
        )
        shown = self._console.is_terminal
        progress = Progress(*columns, console=self._console, transient=True, disable=not shown)
        progress.add_task(clean(text))
        with progress:
            yield Wait(progress)


class Wait:
    """A spinner that runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        """Another text."""
        self._progress.update(self._progress.task_ids[0], description=clean(text))

    def stop(self) -> None:
        """What follows may be written now. May be called again."""
        self._progress.stop()


class _Stream:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.is_terminal = file.isatty()
        self._styles = self.is_terminal and not Console(file=file).is_dumb_terminal
        self._encoding = file.encoding or "utf-8"
        self._in_line = False

    def write(self, text: str, style: str = "") -> None:
        """Text from anywhere; `style` is one of the codes above."""
        if not text:
            return
        shown = clean(text).encode(self._encoding, "replace").decode(self._encoding)
        self._in_line = not shown.endswith("\n")
        self._file.write(f"{style}{shown}{PLAIN}" if style and self._styles else shown)
        self._file.flush()

    def end_line(self) -> None:
        if self._in_line:
            self.write("\n")
