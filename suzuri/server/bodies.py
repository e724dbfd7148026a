"""From the bytes of a request to the JSON object that they are, in bounded time and memory."""

import json
from typing import Any, NoReturn, cast

from starlette.requests import Request

from suzuri.processing.chat_blocks import json_fault
from suzuri.server.errors import ApiError, invalid

MOST_VALUES = 2_000_000
"""Commas and brackets: more values than any prompt has tokens, each of which takes memory."""
MOST_FIELDS = 200
"""Of the outermost object; no request has so many."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body. Raises ApiError 400, 408, 413, 415 or 429."""
    _check_type(request)
    parts: list[bytes] = []
    async for part in request.stream():  # not kept by the request, which lives as long as a stream
        parts.append(part)
    data = b"".join(parts)
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MOST_VALUES:
        raise ApiError(413, f"the body has more than {MOST_VALUES} values")
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_repeats
        )
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise invalid("the body is nested too deep") from error
    except _Repeated as error:
        key = str(error)
        raise invalid(f"the key {key!r} stands twice in one object", key) from error
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


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
