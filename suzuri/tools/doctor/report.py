"""The report of `suzuri doctor`: its lines, what is blacked out in them, and how they print."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "note", "problem"]
STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
MAX_VALUE = 600
WIDTH = 110
"""Columns of the table in a file or a pipe."""
SHARED_NAMES = frozenset(
    (
        *("root", "user", "users", "admin", "ubuntu", "debian", "ec2-user", "nvidia", "jovyan"),
        *("runner", "nobody", "app", "vscode", "localhost", "home", "work", "workspace"),
        *("linux", "python", "torch", "cuda", "suzuri", "dev", "media", "model", "data", "gpu"),
    )
)
"""Account and host names that say nothing about anybody, and words of the report itself."""
_HIDDEN = (
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{16,}"), "<token>"),
    (re.compile(r"(?<=://)[^/\s@]+@"), "<login>@"),
    (re.compile(r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\b[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5,}\b"), "<address>"),
    (re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.-])"), "<address>"),
    (re.compile(r"(?<![\w:])(?=[0-9a-fA-F:]*::)[0-9a-fA-F:]{3,}(?![\w:])"), "<address>"),
    (re.compile(r"(?<![\w:])([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"(?<![\w.~])/(?:home|Users)/[^/\s:'\"]+"), "~other"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One finding. `fix` says in words what to do about a note or a problem."""

    area: str
    name: str
    value: str
    status: Status = "ok"
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Private:
    """What must not appear in a report. Empty strings hide nothing."""

    home: str = ""
    names: tuple[str, ...] = ()

    def hide(self, text: str) -> str:
        """`text` without home folders, account and host names, tokens and network addresses."""
        if len(self.home) > 1:
            text = re.sub(re.escape(self.home.rstrip("/")) + r"(?![\w-])", "~", text)
        for pattern, replacement in _HIDDEN:
            text = pattern.sub(replacement, text)
        for name in self.names:
            if len(name) > 2 and name.lower() not in SHARED_NAMES:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<name>", text)
        return text


def cleaned(lines: Sequence[Line], private: Private) -> list[Line]:
    """The lines as they may be shown: nothing private, on one line each, of bounded length."""

    def clean(text: str) -> str:
        text = " ".join(private.hide(text).split())
        return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} ..."

    return [
        dataclasses.replace(line, value=clean(line.value), fix=clean(line.fix)) for line in lines
    ]


def verdict(lines: Sequence[Line]) -> str:
    """The last line of the report."""
    problems = [line for line in lines if line.status == "problem"]
    notes = sum(line.status == "note" for line in lines)
    if not problems:
        return f"OK: {len(lines)} checks, {notes} note(s), no problem"
    first = problems[0]
    return f"{len(problems)} problem(s): first {first.area}, {first.name}: {first.value}"


def show(lines: Sequence[Line], version: str, *, as_json: bool) -> int:
    """Print the report. Returns the exit code: 1 when there is a problem, else 0."""
    num_problems = sum(line.status == "problem" for line in lines)
    if as_json:
        document = {
            "suzuri": version,
            "verdict": verdict(lines),
            "problems": num_problems,
            "lines": [dataclasses.asdict(line) for line in lines],
        }
        print(json.dumps(document, indent=1))  # plain ASCII, so no locale can refuse it
        return 1 if num_problems else 0
    table = Table(box=box.SIMPLE_HEAD, title=f"suzuri {version}", title_justify="left")
    for heading in ("area", "check", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    area = ""
    for line in lines:
        found = Text(printable(line.value))
        if line.fix:
            found.append(f"\n-> {printable(line.fix)}", style="bold")
        state = Text(line.status, style=STYLES[line.status])
        table.add_row(line.area if line.area != area else "", line.name, state, found)
        area = line.area
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    print(printable(verdict(lines)))
    return 1 if num_problems else 0


def printable(text: str) -> str:
    """`text` with what this output cannot encode replaced, so that printing never fails."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding, "replace")
