"""A line of a JSONL file as an object with known keys, and where its media are. No torch here."""

# pyright: strict

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

BOM = b"\xef\xbb\xbf"
_MEDIA = ("image_url", "audio_url", "image", "audio")


def parse_object(line: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """Raises ValueError saying what is wrong with the line: no UTF-8, no JSON, no object, or one
    with other keys."""
    try:
        value: object = json.loads(line.removeprefix(BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}; write the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error}); a line is one whole object") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with {', '.join(keys)}")
    fields = cast("dict[str, Any]", value)
    if unknown := sorted(set(fields) - set(keys)):
        raise ValueError(f"unknown key {', '.join(unknown)}; there are {', '.join(keys)}")
    return fields


def in_folder(message: object, folder: Path) -> Any:
    """A message with the relative paths of its media put under the folder of the file."""
    content = cast("Mapping[str, Any]", message).get("content") if _is_object(message) else None
    if not isinstance(content, list):
        return message
    parts: list[object] = []
    for part in cast("list[object]", content):
        kind = cast("Mapping[str, Any]", part).get("type") if _is_object(part) else None
        if kind in _MEDIA:
            fields = dict(cast("Mapping[str, Any]", part))
            value: object = fields.get(kind)
            if isinstance(value, str):
                fields[kind] = _path(value, folder)
            elif _is_object(value):
                inner = dict(cast("Mapping[str, Any]", value))
                if isinstance(inner.get("url"), str):
                    inner["url"] = _path(inner["url"], folder)
                fields[kind] = inner
            parts.append(fields)
        else:
            parts.append(part)
    return {**cast("Mapping[str, Any]", message), "content": parts}


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _path(text: str, folder: Path) -> str:
    """A URL, an absolute path and an empty text are left as they are."""
    if not text.strip() or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
        return text
    return str(folder / text)
