"""Log-probs in the three shapes in which clients know them.

Many of them are made into JSON slice by slice, so that other requests are not held up, and those
of a prompt once for all of its samples.
"""

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from suzuri.engine.messages import Event, Logprobs
from suzuri.model.config import FIRST_SPECIAL
from suzuri.server.errors import invalid
from suzuri.server.service import Service

LEAST = -9999.0
"""In place of minus infinity, which JSON cannot say; as vLLM does."""
MOST_ENTRIES = 2**19
"""Log-probs of prompts in one answer: about 35 MB."""
MOST_TOKENS = 2**21
"""Tokens of prompts in one answer that shows no more of them than their text and ids."""
_SLICE = 2**14
"""Entries that are made in one go: about 20 ms."""
_encode = msgspec.json.Encoder().encode


def check_entries(num_tokens: int, n: int, tops: dict[str, int | None]) -> None:
    """Refuse an answer that would tell too much about its prompts. `tops`: by the field that asks
    for it, the alternatives of each token; None for the token alone. Raises ApiError."""
    each = sum(0 if top is None else top + 1 for top in tops.values())
    most, what = (MOST_ENTRIES, "log-probs") if each else (MOST_TOKENS, "tokens")
    total = num_tokens * n * max(each, 1)
    if total > most:
        per = f", {each} log-probs for each of them" if each else ""
        raise invalid(
            f"{' and '.join(tops)}: {num_tokens} tokens of prompt{per} and n = {n} make {total} "
            f"{what}; at most {most} go into one answer; ask for fewer, or send several requests",
            next(iter(tops)),
        )


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

    async def encoded(
        self, ids: Sequence[int], found: Sequence[Logprobs | None], top: int
    ) -> dict[str, bytes]:
        """`entries` of many tokens, each list as JSON without its brackets, for `joined`."""
        parts: dict[str, list[bytes]] = {}
        step = max(1, _SLICE // (top + 3))
        for start in range(0, len(ids), step):
            some = slice(start, start + step)
            for name, values in self.entries(ids[some], found[some], top).items():
                parts.setdefault(name, []).append(_encode(values)[1:-1])
            await asyncio.sleep(0)
        return {name: b",".join(own) for name, own in parts.items()}

    def end_prompt(self) -> int:
        """The text of the prompt is over: a character does not go on in the answer. Returns where
        the answer begins."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return self._offset

    def begin_at(self, offset: int) -> None:
        """After a prompt that was shown."""
        self._offset = offset

    def _top(self, id: int, found: Logprobs, top: int) -> dict[str, float]:
        service = self._service
        pairs = [(token_name(service, other), _real(value)) for other, value in found.top[:top]]
        pairs.append((token_name(service, id), _real(found.raw)))
        values: dict[str, float] = {}
        for name, value in pairs:  # bytes of broken characters are spelled alike: the likeliest
            values.setdefault(name, value)
        return values


def joined(*parts: dict[str, bytes]) -> msgspec.Raw:
    """What `CompletionLogprobs.encoded` made, one after the other."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists = {name: b",".join(part[name] for part in parts if part.get(name)) for name in names}
    inner = b",".join(b'"%s":[%s]' % (name.encode(), found) for name, found in lists.items())
    return msgspec.Raw(b"{" + inner + b"}")


async def prompt_entries(
    service: Service, ids: Sequence[int], found: Sequence[Logprobs], top: int
) -> msgspec.Raw:
    """vLLM's prompt_logprobs: one entry per token of the prompt, None for the first."""
    parts = [b"[null"]
    step = max(1, _SLICE // (top + 1))
    for start in range(1, len(ids), step):
        some = _prompt_entries(
            service, ids[start : start + step], found[start - 1 : start - 1 + step], top
        )
        parts += (b",", _encode(some)[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"".join([*parts, b"]"]))


def _prompt_entries(
    service: Service, ids: Sequence[int], found: Sequence[Logprobs], top: int
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for id, one in zip(ids, found, strict=True):
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
    is held back, so that a stream can begin with them."""

    def __init__(self, *, wanted: bool) -> None:
        self._of: dict[int, list[Logprobs]] = {}
        """By the number of the prompt."""
        self._wanted = wanted
        self._held: dict[int, list[Event]] = {}

    def through(self, place: int, events: list[Event]) -> list[Event]:
        """What may be used now."""
        if not self._wanted or place in self._of:
            return events
        held = [*self._held.pop(place, ()), *events]
        for event in events:
            if event.index == 0:
                self._of[place] = event.prompt_logprobs or []
                return held
        self._held[place] = held
        return []

    def taken(self, place: int) -> list[Logprobs]:
        """Those of a prompt, which are not kept here any longer."""
        found = self._of.get(place, [])
        if found:
            self._of[place] = []
        return found
