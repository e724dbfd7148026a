"""Log-probs in the three shapes in which clients know them."""

import codecs
from collections.abc import Sequence
from typing import Any

from suzuri.engine.messages import Event, Logprobs
from suzuri.model.config import FIRST_SPECIAL
from suzuri.server.service import Service

LEAST = -9999.0
"""In place of minus infinity, which JSON cannot say; as vLLM does."""


def token_name(service: Service, id: int) -> str:
    """The text of an id. One that structures a turn is named by its number, because its markup is
    no text."""
    return f"token_id:{id}" if id >= FIRST_SPECIAL else service.spelled(id)


def chat_entry(service: Service, id: int, found: Logprobs, top: int) -> dict[str, Any]:
    """One entry of choices[].logprobs.content."""
    return {
        **_one(service, id, found.raw),
        "top_logprobs": [_one(service, other, value) for other, value in found.top[:top]],
    }


def _one(service: Service, id: int, value: float | None) -> dict[str, Any]:
    spelled = None if id >= FIRST_SPECIAL else list(service.texts.token_bytes[id])
    return {"token": token_name(service, id), "logprob": _real(value), "bytes": spelled}


def _real(value: float | None) -> float:
    return LEAST if value is None or value < LEAST else value


class CompletionLogprobs:
    """choices[].logprobs of a completion. `text_offset` is where a token begins in the text: of one
    within a character, where that does. `skip`: tokens without text have none there."""

    def __init__(self, service: Service, *, skip: bool = True) -> None:
        self._service, self._skip, self._offset = service, skip, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entries(
        self, ids: Sequence[int], found: Sequence[Logprobs | None], top: int
    ) -> dict[str, Any]:
        """Of the next tokens. None in `found`: nothing is known of that token."""
        service = self._service
        offsets: list[int] = []
        for id in ids:
            offsets.append(self._offset)
            if id < FIRST_SPECIAL or not self._skip:
                self._offset += len(self._decoder.decode(service.texts.token_bytes[id]))
        return {
            "tokens": [token_name(service, id) for id in ids],
            "token_logprobs": [None if one is None else _real(one.raw) for one in found],
            "top_logprobs": [
                None if one is None else self._top(id, one, top)
                for id, one in zip(ids, found, strict=True)
            ],
            "text_offset": offsets,
        }

    def end_prompt(self) -> None:
        """The text of the prompt is over: a character does not go on in the answer."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _top(self, id: int, found: Logprobs, top: int) -> dict[str, float]:
        service = self._service
        pairs = [(token_name(service, other), _real(value)) for other, value in found.top[:top]]
        pairs.append((token_name(service, id), _real(found.raw)))
        values: dict[str, float] = {}
        for name, value in pairs:  # bytes of broken characters are spelled alike: the likeliest
            values.setdefault(name, value)
        return values


def prompt_entries(
    service: Service, ids: Sequence[int], found: Sequence[Logprobs], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: one entry per token of the prompt, None for the first."""
    entries: list[dict[str, Any] | None] = [None]
    for id, one in zip(ids[1:], found, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(one.top[:top], start=1)}
        values = {id: one.raw, **dict(one.top[:top])}
        entries.append(
            {
                str(other): {
                    "logprob": _real(value),
                    "rank": ranks.get(other),
                    "decoded_token": token_name(service, other),
                }
                for other, value in values.items()
            }
        )
    return entries


class PromptFirst:
    """Log-probs of prompts come with the first token of sample 0; what other samples bring before
    is held back, so that a stream can begin with them. `of`: by the number of the prompt."""

    def __init__(self, *, wanted: bool) -> None:
        self.of: dict[int, list[Logprobs]] = {}
        self._wanted = wanted
        self._held: dict[int, list[Event]] = {}

    def through(self, place: int, events: list[Event]) -> list[Event]:
        """What may be used now."""
        if not self._wanted or place in self.of:
            return events
        held = [*self._held.pop(place, ()), *events]
        for event in events:
            if event.index == 0:
                self.of[place] = event.prompt_logprobs or []
                return held
        self._held[place] = held
        return []
