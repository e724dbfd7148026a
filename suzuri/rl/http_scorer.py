"""A running server that says how likely it finds what another model drew. No torch here."""

# pyright: strict

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from suzuri.rl.http_calls import Calls, Lost, Refused
from suzuri.rl.scores import tokens_of
from suzuri.types import Array, Sample

SECONDS = 600.0
"""For one conversation."""
TRIES = 6
MOST_AT_ONCE = 64


class HttpScorer:
    """Over /v1/completions of `suzuri serve`, and of whatever else takes token ids there and gives
    `prompt_logprobs` and `prompt_token_ids` back."""

    def __init__(self, url: str, *, tries: int = TRIES) -> None:
        self._calls = Calls(url.rstrip("/"), None, tries=tries, most_at_once=MOST_AT_ONCE)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        """As `Scorer` (scores.py). Pictures and clips cannot be sent."""
        return list(await asyncio.gather(*map(self._one, samples)))

    async def _one(self, sample: Sample) -> Array | str:
        if sample.media:
            return "it takes text only; give a model folder for conversations with media"
        tokens = tokens_of(sample)
        body = {
            "prompt": tokens,
            "max_tokens": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        try:
            reply = await self._calls.ask("POST", "/v1/completions", body, seconds=SECONDS)
            return _read(reply, tokens)
        except (Lost, Refused) as error:
            return str(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return f"{self._calls.url}: no log-probs in its answer ({type(error).__name__})"

    async def close(self) -> None:
        await self._calls.close()


def _read(reply: dict[str, Any], tokens: Sequence[int]) -> Array | str:
    (choice,) = reply["choices"]
    if list(choice["prompt_token_ids"]) != list(tokens):
        return "it reads other tokens: its vocabulary lacks some that the model draws"
    entries = choice["prompt_logprobs"]
    found = [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)
    ]
    return np.array([np.nan if one is None else one for one in found], np.float32)
