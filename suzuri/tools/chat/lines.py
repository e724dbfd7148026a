"""Where the lines of a chat come from: somebody at a terminal, or a pipe."""

import contextlib
import sys
from typing import Protocol

LONG = '"""'


class Lines(Protocol):
    """is_terminal: whether somebody types them."""

    is_terminal: bool

    def read(self, prompt: str) -> str | None:
        """The next line without its end, None after the last. Raises ValueError for what is no
        text, KeyboardInterrupt for Ctrl-C."""
        ...


class TerminalLines:
    """Lines that are edited with readline where Python has it. A text between two of LONG may have
    several lines."""

    is_terminal = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]

    def read(self, prompt: str) -> str | None:
        line = _typed(prompt)
        if line is None or not line.lstrip().startswith(LONG):
            return line
        text = line.lstrip().removeprefix(LONG)
        while not text.rstrip().endswith(LONG):
            more = _typed("... ")
            if more is None:
                return None
            text += f"\n{more}"
        return text.rstrip().removesuffix(LONG)


def _typed(prompt: str) -> str | None:
    # Where the output goes elsewhere, `input` would write the prompt into it.
    if not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return _checked(input(prompt))
    except EOFError:
        print(file=sys.stdout if sys.stdout.isatty() else sys.stderr)
        return None
    except UnicodeDecodeError as error:
        raise ValueError("the line is not UTF-8") from error


class PipedLines:
    """Lines as they stand."""

    is_terminal = False

    def read(self, prompt: str) -> str | None:
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        try:
            return line.decode().removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError("the line is not UTF-8; convert the input") from error


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the line is not UTF-8") from error
    return text
