"""Stop strings in a chat: they end the answer where they stand in its text, and nowhere else.

Thoughts, names and the JSON of calls are not searched: a model that thinks aloud repeats what it
was asked. The engine and the server both run a `StoppedTurn` over the same ids, so they find the
same end. Torch-free.
"""

# pyright: strict

import dataclasses
from collections.abc import Callable, Sequence

from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stopping import Stop, StopChecker, StopStrings
from suzuri.processing.chat_output import ChatOutputParser, Piece


class StoppedTurn:
    """One turn, id by id, up to the first stop string of `params` in a block of the answer's text.

    A string is looked for within one block; what may become one is held back until the block ends.
    The first min_tokens tokens complete none. `found`: the string that ended the turn.
    """

    def __init__(
        self, params: SamplingParams, token_bytes: Callable[[int], bytes], *, tools: bool
    ) -> None:
        self.found: str | None = None
        self._parser = ChatOutputParser(token_bytes, tools=tools)
        self._strings = StopStrings(params.stop_strings)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._block = 0
        self._shown: list[Piece] = []

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """What the next ids bring; nothing after the end."""
        for id in ids:
            if self.found is not None:
                break
            self._num_tokens += 1
            self._take(self._parser.push((id,)))
            if not self._parser.is_in_content:
                self._release()
        return self._taken()

    def finish(self) -> list[Piece]:
        """The output is over: what was held back, and the ends of what is open."""
        if self.found is None:
            self._take(self._parser.finish())
            self._release()
        return self._taken()

    def _taken(self) -> list[Piece]:
        shown, self._shown = self._shown, []
        return shown

    def _take(self, pieces: list[Piece]) -> None:
        may_stop = self._num_tokens > self._min_tokens
        for piece in pieces:
            if piece.kind != "content" or piece.index != self._block:
                self._release()
            if piece.kind != "content":
                self._shown.append(piece)
                continue
            self._block = piece.index
            text, self.found = self._strings.push(piece.text, may_stop=may_stop)
            if self.found is not None and self._include:
                text += self.found
            if text or not piece.text or self.found is not None:
                self._shown.append(Piece("content", text, piece.index))
            if self.found is not None:
                return

    def _release(self) -> None:
        if self.found is None and (text := self._strings.rest()):
            self._shown.append(Piece("content", text, self._block))


class ChatStopChecker(StopChecker):
    """A StopChecker that looks for stop strings as StoppedTurn does. It shows no text: whoever gets
    the ids reads them. The other fields of `params` act as they do there."""

    def __init__(
        self,
        params: SamplingParams,
        token_bytes: Callable[[int], bytes],
        *,
        tools: bool,
        eos_token_id: int | None,
        limit: int | None = None,
    ) -> None:
        plain = dataclasses.replace(params, stop=None, detokenize=False)
        super().__init__(plain, None, eos_token_id=eos_token_id, limit=limit)
        self._turn = StoppedTurn(params, token_bytes, tools=tools)

    def _push(self, id: int) -> str:
        text = super()._push(id)
        if self.stop is None or self.stop.reason == "length":
            self._turn.push((id,))
            if self._turn.found is not None:
                self.stop = Stop("stop", self._turn.found)
        return text
