"""A line of a JSONL file as an object with known keys. No torch here."""

# pyright: strict

import json
from collections.abc import Sequence
from typing import Any, cast

BOM = b"\xef\xbb\xbf"


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
