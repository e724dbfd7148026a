"""Requests to a server that may be busy, starting, or gone. No torch here."""

# pyright: strict

import asyncio
import json
from typing import Any, cast

import httpx

BUSY, STARTING = 429, 503
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
CONNECT_SECONDS = 10.0


class Lost(Exception):
    """No answer that can be used: what happened, in words."""


class Refused(Exception):
    """The request is at fault, says the server. `status`: HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Calls:
    """One server. `tries`: connections that may fail, and answers that it is not ready, one after
    the other, before it is given up. `most_at_once`: requests; others wait here."""

    def __init__(self, url: str, key: str | None, *, tries: int, most_at_once: int) -> None:
        self.url = url
        self._key, self._tries, self._most = key, tries, most_at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient
        self._gate: asyncio.Semaphore

    def client_fields(self) -> dict[str, Any]:
        """For a client of httpx. What the environment says of proxies counts nothing."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return {"base_url": self.url, "headers": headers, "trust_env": False}

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float
    ) -> dict[str, Any]:
        """The JSON object of the answer, which may take `seconds`, pauses included. What is asked
        must be the same when asked again. Raises Lost or Refused."""
        self._connect()
        where, loop = f"{self.url}{path}", asyncio.get_running_loop()
        end, faults = loop.time() + seconds, 0
        while True:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**faults)
            try:
                async with self._gate:
                    response = await self._client.request(
                        method,
                        path,
                        json=body,
                        timeout=httpx.Timeout(
                            max(end - loop.time(), 1.0), connect=CONNECT_SECONDS, pool=None
                        ),
                    )
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise Lost(f"{where} did not answer within {seconds:g} s") from error
            except httpx.TransportError as error:
                why = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code not in (BUSY, STARTING):
                    return _read(response, where)
                why = f"HTTP {response.status_code}: {_message(response)}"
                pause = max(pause, _seconds(response.headers.get("retry-after", "0")))
                faults -= response.status_code == BUSY
            faults += 1
            if faults >= self._tries or loop.time() + pause > end:
                raise Lost(f"{where}: {why} (asked {faults} times)")
            await asyncio.sleep(pause)

    def _connect(self) -> None:
        """Connections belong to a loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._most)
            self._loop, self._gate = loop, asyncio.Semaphore(self._most)
            self._client = httpx.AsyncClient(**self.client_fields(), limits=limits)

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._client.aclose()
            self._loop = None


def _read(response: httpx.Response, where: str) -> dict[str, Any]:
    if response.status_code >= 500:
        raise Lost(f"{where}: HTTP {response.status_code}: {_message(response)}")
    if response.status_code != 200:
        raise Refused(response.status_code, _message(response))
    try:
        return cast("dict[str, Any]", _object(response))
    except ValueError as error:
        raise Lost(
            f"{where} answers with what is no JSON object; is it a Suzuri server?"
        ) from error


def _message(response: httpx.Response) -> str:
    try:
        return str(_object(response)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def _object(response: httpx.Response) -> Any:
    found: Any = json.loads(response.content)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return cast("Any", found)


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0
