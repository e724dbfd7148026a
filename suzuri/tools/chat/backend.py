"""What a chat talks to: a server (remote.py) or a model in this process (local.py). No torch."""

import dataclasses
from collections.abc import Generator
from typing import Any, Protocol

from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat_output import Piece
from suzuri.processing.media import Kind

Message = dict[str, Any]
"""A message in OpenAI's form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for the model's next turn."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    effort: str | float
    params: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """An answer is over. finish: "stop", "length", or the server's own word. Counts in tokens, None
    where they are not known."""

    finish: str
    num_tokens: int | None = None
    num_prompt: int | None = None
    num_cached: int | None = None


class AnswerFailed(Exception):
    """No answer, or not all of one; the reason and the fix are in the text."""


Part = list[Piece] | Ended


class Backend(Protocol):
    """`name` of the model and the longest conversation in tokens (None: not known), to show."""

    name: str
    max_context: int | None

    def check_media(self, kind: Kind, data: bytes) -> str:
        """Words about a picture or clip that can be sent, maybe "". Raises ValueError if not."""
        ...

    def answer(self, ask: Ask) -> Generator[Part]:
        """The turn as it comes: pieces, the first list of them (maybe empty) with the first token,
        and Ended at last. Closing it, or an interrupt in it, ends the request. Raises AnswerFailed.
        """
        ...
