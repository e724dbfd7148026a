"""Conversations of JSONL files, read line by line when asked for. docs/training.md has the format.

Only where the lines are is kept in memory: 24 bytes each.
"""

import array
import hashlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from suzuri.processing.chat import effort_level
from suzuri.processing.json_lines import BOM, in_folder, parse_object
from suzuri.types import Conversation

KEYS = ("messages", "tools", "reasoning_effort", "text")


class _File(NamedTuple):
    path: str
    descriptor: int
    first: int
    """Index of its first conversation."""


class JsonlData:
    """A `Dataset` of files, one after the other; blank lines do not count.

    Raises OSError for what cannot be read, ValueError for files without any line. Paths of media
    are taken from the folder of their file. `digest` is that of all bytes, in hex.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._files: list[_File] = []
        self._offsets, self._lengths = array.array("q"), array.array("q")
        self._numbers = array.array("q")
        digest = hashlib.blake2b(digest_size=16)
        for path in paths:
            self._index(path, digest)
        if not self._offsets:
            raise ValueError(f"{', '.join(paths)}: no line, so nothing to learn from")
        self.digest = digest.hexdigest()

    @property
    def size(self) -> int:
        return len(self._offsets)

    def place(self, index: int) -> str:
        """FILE:LINE of a conversation."""
        return f"{self._file(index).path}:{self._numbers[index]}"

    def conversation(self, index: int) -> Conversation:
        """The one on the line. Raises ValueError saying what is wrong with the line, not which."""
        file = self._file(index)
        line = os.pread(file.descriptor, self._lengths[index], self._offsets[index])
        return parse_line(line, Path(file.path).parent)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the files itself."""
        return self.__dict__ | {"_files": [(f, _version(f.descriptor)) for f in self._files]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises OSError or ValueError where a file is not there any more as it was."""
        self.__dict__ |= state | {"_files": []}
        for file, version in state["_files"]:
            descriptor = self._held(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
            if _version(descriptor) != version:
                raise ValueError(f"{file.path} was changed since it was first read")
            self._files.append(file._replace(descriptor=descriptor))

    def _held(self, descriptor: int) -> int:
        """Closed with this object."""
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _index(self, path: str, digest: Any) -> None:
        with open(path, "rb") as lines:
            # Kept apart from the file object, for reads that move no common position.
            descriptor = self._held(os.dup(lines.fileno()))
            self._files.append(_File(path, descriptor, len(self._offsets)))
            offset = 0
            for number, line in enumerate(lines, 1):
                digest.update(line)
                if line.strip(BOM + b" \t\r\n"):
                    self._offsets.append(offset)
                    self._lengths.append(len(line))
                    self._numbers.append(number)
                offset += len(line)

    def _file(self, index: int) -> _File:
        return next(file for file in reversed(self._files) if file.first <= index)


def _version(descriptor: int) -> tuple[int, ...]:
    """Another one after a file was written or replaced."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def parse_line(line: bytes, folder: Path) -> Conversation:
    """The conversation of a line; paths of media in it are taken from `folder`. Raises ValueError
    saying what is wrong with it."""
    fields = parse_object(line, KEYS)
    if "text" in fields:
        if len(fields) > 1:
            raise ValueError("text stands alone; give messages for a conversation")
        if not isinstance(fields["text"], str) or not fields["text"]:
            raise ValueError("text must be a string that is not empty")
        return Conversation(text=fields["text"])
    if "messages" not in fields:
        raise ValueError("neither messages nor text")
    effort = fields.get("reasoning_effort")
    if effort is not None:
        effort_level(effort)
    messages = fields["messages"]
    if isinstance(messages, list):
        messages = [in_folder(message, folder) for message in cast("list[object]", messages)]
    # What is no list of messages or tools is refused where all of them are checked.
    return Conversation(messages=messages, tools=fields.get("tools"), effort=effort)  # pyright: ignore[reportArgumentType]
