"""Plain HTTP for a chat: JSON and server-sent events over the standard library, errors in words."""

import contextlib
import http.client
import json
import socket
from collections.abc import Generator
from typing import Any, cast
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
MOST_ERROR_BYTES = 1 << 16


class ServerError(Exception):
    """The server could not be asked, or refused: what happened and the fix. `status`: HTTP's, None
    if there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server, a new connection for each request. url: its root, without /v1."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._parts = urlsplit(url)
        self._headers = {"Accept": "application/json, text/event-stream"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises ServerError."""
        with self._answer("GET", path, None, CONNECT_SECONDS) as response:
            return self._object(response.read())

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """POST a body; the objects of the event stream that comes back, up to its [DONE].

        Raises ServerError, also for an error in the stream and for one that breaks off.
        """
        data = json.dumps(body).encode()
        with self._answer("POST", path, data, None) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise self._no_api("it does not stream")
            for text in _event_data(response):
                if text == "[DONE]":
                    return
                event = self._object(text.encode())
                if event.get("error"):
                    raise ServerError(_message(event) or "the server failed", response.status)
                yield event
        raise ServerError("the server closed the connection before the answer was over")

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, data: bytes | None, seconds: float | None
    ) -> Generator[http.client.HTTPResponse]:
        """A response with status 200. seconds: the longest silence, None for any."""
        is_secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_SECONDS)
        headers = dict(self._headers)
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            try:
                connection.connect()
            except OSError as error:
                raise ServerError(
                    f"nothing answers at {self.url} ({_reason(error)}); start a server (suzuri "
                    "serve MODEL --port 8000), or give the --url of one"
                ) from error
            connection.sock.settimeout(seconds)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A server that refuses early may stop reading: what it says is read all the same.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._parts.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response.status, path, response.read(MOST_ERROR_BYTES))
            yield response
        except (OSError, http.client.IncompleteRead) as error:
            raise ServerError(f"the connection to {self.url} broke ({_reason(error)})") from error
        except http.client.HTTPException as error:
            raise self._no_api(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _refusal(self, status: int, path: str, data: bytes) -> ServerError:
        try:
            said = _message(self._object(data))
        except ServerError:
            said = ""
        if status == 401:
            why = said or "no key, or a wrong one"
            return ServerError(f"{why} (401); give --api-key-file FILE or --api-key KEY", status)
        if not said:
            said = f"{self.url}{path} answers {status}; check --url"
        return ServerError(said, status)

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            found: object = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise self._no_api("it sends what is no JSON") from error
        if not isinstance(found, dict):
            raise self._no_api("it sends what is no JSON object")
        return cast("dict[str, Any]", found)

    def _no_api(self, why: str) -> ServerError:
        return ServerError(f"{self.url} is no server with OpenAI's API ({why}); check --url")


def _event_data(response: http.client.HTTPResponse) -> Generator[str]:
    """The data of server-sent events. One that its blank line does not end is none."""
    data: list[str] = []
    while line := response.readline():
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text:
            if data:
                yield "\n".join(data)
            data.clear()
        elif text.startswith("data:"):
            data.append(text[len("data:") :].removeprefix(" "))


def _message(answer: dict[str, Any]) -> str:
    """What an error object says, in the forms that servers use."""
    error = answer.get("error") or answer
    if isinstance(error, dict):
        fields = cast("dict[str, Any]", error)
        error = next(
            (fields[key] for key in ("message", "reason", "detail") if fields.get(key)), ""
        )
    return str(error)


def _reason(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__
