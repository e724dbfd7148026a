"""Log-probs in the three shapes in which clients know them."""

from collections.abc import Sequence
from typing import Any

from suzuri.engine.messages import Logprobs
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
    """choices[].logprobs of a completion; `text_offset` counts in the text of the tokens before."""

    def __init__(self, service: Service, offset: int = 0) -> None:
        self._service, self._offset = service, offset

    def entries(
        self, ids: Sequence[int], found: Sequence[Logprobs | None], top: int
    ) -> dict[str, Any]:
        """Of the next tokens. None in `found`: nothing is known of that token."""
        service = self._service
        tokens = [token_name(service, id) for id in ids]
        offsets: list[int] = []
        for id, token in zip(ids, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += 0 if id >= FIRST_SPECIAL else len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else _real(one.raw) for one in found],
            "top_logprobs": [
                None if one is None else self._top(id, one, top)
                for id, one in zip(ids, found, strict=True)
            ],
            "text_offset": offsets,
        }

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
