"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} and a status."""

import contextlib
import re
from collections.abc import Generator

import msgspec
from starlette.responses import Response

from suzuri.engine.stream import EngineUnavailable, RequestRefused
from suzuri.server.text_client import TextRefused, TextUnavailable

RETRY_SECONDS = 2
LONGEST = 2000
"""Characters of a message."""
LONGEST_PARAM = 100
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""Error types by HTTP status."""


class ApiError(Exception):
    """Ends a request with this status. `param` names the field at fault; `retry` makes a
    Retry-After header, in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _sayable(message), code
        self.param = None if param is None else _sayable(param, LONGEST_PARAM)
        self.retry = retry

    def body(self) -> bytes:
        """The JSON."""
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, _other_type(self.status)),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, "application/json")


def _sayable(text: str, most: int = LONGEST) -> str:
    """Part of a request may be in a message: at any length, and with halves of surrogate pairs."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return text.encode("utf-8", "replace").decode()


def _other_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def unavailable(message: str) -> ApiError:
    """Nothing serves now, and it may again soon."""
    return ApiError(503, message, code="unavailable", retry=RETRY_SECONDS)


def invalid(message: str, param: str | None = None) -> ApiError:
    """The request is at fault. Without `param`, the field that the message begins with."""
    return ApiError(400, message, param=param or _field(message), code="invalid_value")


def as_api_error(error: Exception) -> ApiError:
    """What the engine or the text processes said, for the client."""
    match error:
        case RequestRefused() | TextRefused():
            return invalid(str(error))
        case EngineUnavailable() | TextUnavailable():
            return unavailable(f"{error}; send the request again")
        case _:
            raise error


FROM_PROCESSES = (RequestRefused, EngineUnavailable, TextRefused, TextUnavailable)
"""What `as_api_error` knows."""


@contextlib.contextmanager
def sending() -> Generator[None]:
    """Around what is sent to the engine: its errors, and those of texts and integers that cannot be
    sent, as ApiError."""
    try:
        yield
    except FROM_PROCESSES as error:
        raise as_api_error(error) from error
    except (UnicodeEncodeError, OverflowError) as error:
        raise invalid(
            "a text holds half of a surrogate pair, or an integer has more than 64 bits"
        ) from error


_FIELDS = {
    "the conversation ": "messages",
    "the prompt ": "prompt",
    "prompt (": "max_tokens",
    "reasoning effort ": "reasoning_effort",
}
"""By how the messages of the engine and of the renderer begin that do not begin with the field."""
_FIELD = re.compile(r"([a-z_]+)(?:\[| =| key|:|\.| is | has | and )")


def _field(message: str) -> str | None:
    for begin, field in _FIELDS.items():
        if message.startswith(begin):
            return field
    found = _FIELD.match(message)
    return found[1] if found else None
