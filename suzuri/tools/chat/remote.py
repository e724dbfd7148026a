"""A server with OpenAI's API that answers a chat. No torch."""

import contextlib
import time
from collections.abc import Generator
from typing import Any, cast

from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat_output import Piece
from suzuri.processing.media import Kind
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended, Part
from suzuri.tools.chat.display import Display
from suzuri.tools.chat.http import Server, ServerError

POLL_SECONDS = 0.5
TOWERS: dict[Kind, tuple[str, str]] = {
    "image": ("has_image_understanding", "vision tower; leave the picture out"),
    "audio": ("has_audio_understanding", "audio tower; leave the clip out"),
}


class RemoteBackend:
    """Waits until the server takes requests. Raises ValueError for one that cannot be used.

    model: which of its models, None for the first.
    """

    def __init__(self, url: str, key: str | None, model: str | None, display: Display) -> None:
        self._server = Server(url, key)
        try:
            models = _named(self._server.get("/v1/models"))
            if not models:
                raise ServerError(f"{url} has no models; check --url")
            if model is not None and model not in models:
                raise ServerError(f"{url} has no model {model!r}; it has {', '.join(models)}")
            _wait_ready(self._server, display)
            self._info = _optional(self._server, "/get_model_info")
        except ServerError as error:
            raise ValueError(str(error)) from error
        self.name = model or next(iter(models))
        self.max_context: int | None = self._info.get("max_context", models[self.name])

    def check_media(self, kind: Kind, data: bytes) -> str:
        field, without = TOWERS[kind]
        if self._info.get(field) is False:
            raise ValueError(f"this model has no {without}")
        return ""

    def answer(self, ask: Ask) -> Generator[Part]:
        reader = DeltaReader()
        finish: str | None = None
        usage: dict[str, Any] = {}
        try:
            stream = self._server.events("/v1/chat/completions", self._body(ask))
            with contextlib.closing(stream) as events:
                for event in events:
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        yield reader.push(choice.get("delta") or {})
                        finish = choice.get("finish_reason") or finish
        except ServerError as error:
            raise AnswerFailed(str(error)) from error
        except (AttributeError, TypeError) as error:
            raise AnswerFailed(f"the server's events are not OpenAI's ({error})") from error
        yield reader.finish()
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        yield Ended(
            finish="stop" if finish in (None, "tool_calls") else finish,
            num_tokens=usage.get("completion_tokens"),
            num_prompt=usage.get("prompt_tokens"),
            num_cached=details.get("cached_tokens"),
        )

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": ask.messages,
            "reasoning_effort": ask.effort,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_sampling(ask.params),
        }
        if ask.tools:
            body["tools"] = ask.tools
        return body


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Those of other servers that are off are left out, as they may not know them."""
    fields: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    optional = {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "top_k": params.top_k or None,
        "min_p": params.min_p or None,
        "stop": list(params.stop_strings) or None,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


class DeltaReader:
    """Makes the pieces of a turn out of OpenAI's deltas."""

    def __init__(self) -> None:
        self._kind = ""
        self._block = -1
        self._calls = 0
        self._open: int | None = None
        """The server's number of the call that is being written."""

    def push(self, delta: dict[str, Any]) -> list[Piece]:
        """Raises ServerError for calls that are mixed up."""
        pieces: list[Piece] = []
        texts = {
            "reasoning": delta.get("reasoning_content", delta.get("reasoning")),
            "content": delta.get("content"),
        }
        for kind, text in texts.items():
            # Beside a role, servers send an empty text that is no block.
            if text is None or (text == "" and "role" in delta):
                continue
            pieces += self._end_call()
            if self._kind != kind:
                self._kind = kind
                self._block += 1
            pieces.append(Piece(cast("Any", kind), _valid(text), self._block))
        for call in delta.get("tool_calls") or ():
            pieces += self._call(call)
        return pieces

    def finish(self) -> list[Piece]:
        return self._end_call()

    def _call(self, call: dict[str, Any]) -> list[Piece]:
        pieces: list[Piece] = []
        function: dict[str, Any] = call.get("function") or {}
        number = call.get("index", 0)
        self._kind = ""
        if number != self._open:
            pieces += self._end_call()
            name = function.get("name")
            if not name:
                raise ServerError("the server's tool calls come without a name, or mixed up")
            self._open = number
            pieces.append(Piece("tool_start", index=self._calls, name=_valid(name)))
        if arguments := function.get("arguments"):
            pieces.append(Piece("tool_arguments", _valid(arguments), self._calls))
        return pieces

    def _end_call(self) -> list[Piece]:
        if self._open is None:
            return []
        self._open = None
        self._calls += 1
        return [Piece("tool_end", index=self._calls - 1)]


def _valid(text: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no character."""
    return text.encode("utf-8", "replace").decode()


def _named(listed: dict[str, Any]) -> dict[str, int | None]:
    """Name and context of each model. Raises ServerError for what is no list of them."""
    try:
        return {str(model["id"]): model.get("max_model_len") for model in listed["data"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError("the server's /v1/models is no list of models; check --url") from error


def _wait_ready(server: Server, display: Display) -> None:
    """Until the server takes requests, as long as it says why not."""
    with display.waiting("") as wait:
        while True:
            try:
                server.get("/health/ready")
                return
            except ServerError as error:
                if error.status != 503:
                    if error.status is None:
                        raise
                    return  # another server, which has no such page
                wait.say(f"{server.url}: {error}")
                time.sleep(POLL_SECONDS)


def _optional(server: Server, path: str) -> dict[str, Any]:
    try:
        return server.get(path)
    except ServerError as error:
        if error.status is None or error.status == 401:
            raise
        return {}
