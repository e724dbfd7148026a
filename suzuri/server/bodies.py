"""From the bytes of a request to the JSON object that they are, in bounded time and memory."""

import contextlib
import gc
import json
from collections.abc import Generator
from typing import Any, NoReturn, cast

from starlette.requests import Request

from suzuri.processing.chat_blocks import json_fault
from suzuri.server.errors import ApiError, invalid

MOST_VALUES = 2_000_000
"""Commas and brackets: more values than any prompt has tokens, each of which takes memory."""
MOST_OBJECTS = 200_000
"""Each takes as long as ten numbers; a conversation that fits into a context has fewer."""
MOST_FIELDS = 200
"""Of the outermost object; no request has so many."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body. Raises ApiError 400, 408, 413, 415 or 429."""
    _check_type(request)
    parts: list[bytes] = []
    async for part in request.stream():  # not kept by the request, which lives as long as a stream
        parts.append(part)
    return _object(b"".join(parts))


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Without garbage collection, which would go through all that is made here again and again:
    for long lists that is most of the time, and everybody waits for it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _object(data: bytes) -> dict[str, Any]:
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MOST_VALUES:
        raise ApiError(413, f"the body has more than {MOST_VALUES} values")
    try:
        with uncollected():
            value = json.loads(
                data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_Objects().made
            )
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise invalid("the body is nested too deep") from error
    except _Repeated as error:
        key = str(error)
        raise invalid(f"the key {key!r} stands twice in one object", key) from error
    except _TooMany as error:
        raise ApiError(413, f"the body has more than {MOST_OBJECTS} objects") from error
    except ValueError as error:
        raise invalid(f"the body is not JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    fields = cast("dict[str, Any]", value)
    if len(fields) > MOST_FIELDS:
        raise invalid(f"the body has {len(fields)} fields; there are not so many parameters")
    return fields


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415, f"Content-Type is {content_type!r}; send JSON and Content-Type: application/json"
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding is {encoding!r}; send the JSON as it is")


class _Repeated(Exception):
    """A key that stands twice."""


class _TooMany(Exception):
    """Objects."""


class _Objects:
    """Those of one body."""

    def __init__(self) -> None:
        self._count = 0

    def made(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1
        if self._count > MOST_OBJECTS:
            raise _TooMany
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise _Repeated(key)
                seen.add(key)
        return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
