"""From a stream of token ids to the text that may be shown, and to the end of the output.

Torch-free. Everything goes id by id and character by character, so that the result does not depend
on how the stream was cut into pushes. `StopChecker.push` first.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import FIRST_SPECIAL


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an output ended. matched: the stop id or stop string; None for the model's own end of
    turn and for "length"."""

    reason: Literal["stop", "length"]
    matched: int | str | None = None


class Pushed(NamedTuple):
    """text: what may be shown now, for good; stop: set in the push that ends the output; num_ids:
    how many of the ids belong to the output, the stop token included."""

    text: str
    stop: Stop | None
    num_ids: int


class Detokenizer:
    """The text of ids as they come: all pieces together are the UTF-8 decoding of all bytes.

    `token_bytes` gives the bytes of an id (Tokenizer.token_bytes). Special ids are left out, or
    spelled <|name|> without `skip_special_tokens`. Bytes that are no UTF-8 become U+FFFD; the
    beginning of a character is held back until it is complete or `flush` gives it up.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, skip_special_tokens: bool = True
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        if self._skip and id >= FIRST_SPECIAL:
            return ""
        return self._decoder.decode(self._token_bytes(id))

    def flush(self) -> str:
        """The end of the stream: U+FFFD if it breaks off within a character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopChecker:
    """One output: its ids go in, its text and its end come out.

    An id ends the output if it is among `stop_token_ids`, or is `eos_token_id` (unless ignore_eos);
    its own text is shown only with include_stop_str_in_output. A stop string ends it at the
    character that completes it, wherever tokens and pushes are cut; where one character completes
    several, the one that began first counts. Text from the string on is dropped (after it, with
    include_stop_str_in_output), and what may still become a stop string is not shown yet. The
    first min_tokens tokens stop nothing. `limit`: the output has at most so many tokens; a stop at
    the last of them comes first. An id costs time for its own characters only.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_bytes: Callable[[int], bytes] | None,
        *,
        eos_token_id: int | None,
        limit: int | None = None,
    ) -> None:
        if params.detokenize and token_bytes is None:
            raise ValueError("detokenize = True: needs token_bytes, the tokenizer's table")
        self.num_tokens = 0
        self.stop: Stop | None = None
        self._stops: dict[int, Stop] = {id: Stop("stop", id) for id in params.stop_token_ids}
        if eos_token_id is not None and not params.ignore_eos:
            self._stops.setdefault(eos_token_id, Stop("stop"))
        self._min_tokens = params.min_tokens
        self._limit = limit
        self._include = params.include_stop_str_in_output
        self._detokenizer = (
            Detokenizer(token_bytes, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize and token_bytes is not None
            else None
        )
        self._matcher = StopStrings(params.stop_strings)

    def push(self, ids: Sequence[int]) -> Pushed:
        """Takes the next ids of the output. After the end, ids are ignored: ("", None, 0)."""
        shown: list[str] = []
        taken = 0
        for id in ids:
            if self.stop is not None:
                break
            taken += 1
            shown.append(self._push(id))
        ended = self.stop if taken else None
        return Pushed("".join(shown), ended, taken)

    def finish(self) -> str:
        """Ends an output that has not stopped by itself (abort, error, end of context): the text
        that was held back. "" after a stop."""
        if self.stop is not None:
            return ""
        self.stop = Stop("length")
        return self._rest()

    def _push(self, id: int) -> str:
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        if may_stop and id in self._stops:
            self.stop = self._stops[id]
            if not self._include or self._detokenizer is None:
                return self._rest()
            return self._matcher.rest() + self._detokenizer.push(id) + self._detokenizer.flush()
        text = ""
        if self._detokenizer is not None:
            text, found = self._matcher.push(self._detokenizer.push(id), may_stop=may_stop)
            if found is not None:
                self.stop = Stop("stop", found)
                return text + found if self._include else text
        if self._limit is not None and self.num_tokens >= self._limit:
            self.stop = Stop("length")
            return text + self._rest()
        return text

    def _rest(self) -> str:
        end = self._detokenizer.flush() if self._detokenizer is not None else ""
        return self._matcher.rest() + end


class StopStrings:
    """Finds the first of several strings in a stream of text (Aho and Corasick, 1975).

    The state is the longest end of the text so far that begins some string: just what has to be
    held back, so no text is kept besides. Nodes are numbers; 0 is the empty beginning.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        self._string = [""]  # one that begins with the node's text
        for string in strings:
            self._add(string)
        self._link()
        self._state = 0

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
                self._string.append(string)
            node = self._next[node][character]
        self._found[node] = string

    def _link(self) -> None:
        """Fallbacks, shallow nodes first: the longest proper end of a node that is one too."""
        waiting = list(self._next[0].values())
        for node in waiting:
            if self._found[node] is None:
                self._found[node] = self._found[self._fallback[node]]
            for character, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], character)
                waiting.append(child)

    def _step(self, node: int, character: str) -> int:
        while character not in self._next[node]:
            if node == 0:
                return 0
            node = self._fallback[node]
        return self._next[node][character]

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """(text that no string can begin in any more, the string found or None).

        Text from the string on is dropped. Without `may_stop`, whole strings are text.
        """
        if len(self._next) == 1:
            return text, None
        begun = self._state
        state = begun
        for place, character in enumerate(text):
            state = self._step(state, character)
            found = self._found[state]
            if found is not None and may_stop:
                self._state = 0
                return self._front(begun, text, self._depth[begun] + place + 1 - len(found)), found
            while state and not self._next[state]:
                state = self._fallback[state]  # a whole string that may not stop, held no longer
        self._state = state
        return self._front(begun, text, self._depth[begun] + len(text) - self._depth[state]), None

    def _front(self, begun: int, text: str, length: int) -> str:
        """The first `length` characters of the text held in state `begun` and what came after."""
        held = self._depth[begun]
        return self._string[begun][: min(held, length)] + text[: max(length - held, 0)]

    def rest(self) -> str:
        """What was held back; the text begins anew after it."""
        held, self._state = self._front(self._state, "", self._depth[self._state]), 0
        return held
