"""The commands of a chat: their names, and what a line means."""

import base64
import dataclasses
import difflib
import shlex
import stat
from pathlib import Path
from typing import Any

from suzuri.processing.media import Kind

COMMANDS = {
    "effort": ("NAME|NUMBER", "how hard the model thinks; without one, show it"),
    "image": ("FILE", "attach a picture to the next message"),
    "audio": ("FILE", "attach a clip to the next message"),
    "system": ("TEXT", "what the model is told first; without one, show it; - for nothing"),
    "retry": ("", "ask for the last answer again"),
    "skip": ("", "go on without the result of a tool call"),
    "clear": ("", "forget the conversation and what is attached"),
    "help": ("", "this list"),
    "exit": ("", "leave, as Ctrl-D does"),
}
"""Name to (argument, what it does)."""
SAME = {"quit": "exit", "?": "help"}
MOST_BYTES = 256 << 20
"""Of a file to attach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A line that is no text for the model."""

    name: str
    argument: str


def parse_line(line: str) -> Command | str:
    """A command, or text: with a slash doubled at its front, it is text with one. ValueError for a
    command that does not exist."""
    if not line.startswith("/"):
        return line
    if line.startswith("//"):
        return line[1:]
    name, _, argument = line[1:].partition(" ")
    name, argument = SAME.get(name, name), argument.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean /{near[0]}?" if near else "/help lists them."
        raise ValueError(f"/{name}: no such command; {meant} Begin with // to send it as text")
    usage, _ = COMMANDS[name]
    if argument and not usage:
        raise ValueError(f"/{name} {argument}: write /{name} alone")
    return Command(name=name, argument=argument)


def usage() -> str:
    """What /help shows."""
    lines = [f"{f'/{name} {argument}':<22}{does}" for name, (argument, does) in COMMANDS.items()]
    more = (
        'Ctrl-C stops an answer. Lines between """ and """ are one message. A message that begins',
        "with / is written with //.",
    )
    return "\n".join([*lines, *more])


def read_file(name: str, command: str) -> tuple[str, bytes]:
    """(name, bytes) of a file as it was typed, dropped or quoted. Raises ValueError."""
    if not name:
        raise ValueError(f"/{command}: give a file, /{command} FILE")
    path = Path(name).expanduser()
    if not path.exists():
        try:
            words = shlex.split(name)
        except ValueError:
            words = []
        if len(words) == 1:
            path = Path(words[0]).expanduser()
    if path.is_dir():
        raise ValueError(f"/{command} {path}: is a folder; give a file")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or device may never end
            raise ValueError(f"/{command} {path}: is no ordinary file; give one")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"/{command} {path}: is larger than {MOST_BYTES >> 20} MiB")
        return path.name, path.read_bytes()
    except OSError as error:
        raise ValueError(f"/{command} {path}: cannot be read ({error.strerror})") from error


def media_part(kind: Kind, name: str, data: bytes) -> dict[str, Any]:
    """A part of a message in OpenAI's form. What the data are is told by themselves."""
    text = base64.b64encode(data).decode()
    suffix = Path(name).suffix.lower().removeprefix(".")
    if kind == "image":
        url = f"data:image/{ {'jpg': 'jpeg'}.get(suffix, suffix) or 'png' };base64,{text}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "input_audio", "input_audio": {"data": text, "format": suffix or "wav"}}
