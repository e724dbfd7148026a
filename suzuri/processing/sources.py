"""Where the bytes of a picture or a clip come from: memory or a local file, never the network."""

import io
import os
import re
from pathlib import Path
from typing import IO

from suzuri.processing.errors import MediaError

MediaBytes = str | os.PathLike[str] | bytes | bytearray


def open_source(source: MediaBytes, what: str) -> IO[bytes]:
    """A seekable file over the bytes; `what` names the thing in errors ("picture", "clip")."""
    if isinstance(source, bytes | bytearray):
        return io.BytesIO(source)
    path = os.fspath(source)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path):
        raise MediaError(f"{path[:60]!r} is a URL, not a file; pass the bytes behind it instead")
    try:
        return Path(path).open("rb")
    except (OSError, ValueError) as error:
        raise MediaError(f"cannot read the {what} {path!r}: {error}") from error


def is_text(start: bytes) -> bool:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    return bool(text) and all(byte >= 32 or byte in b"\t\r\n\f" for byte in text)
