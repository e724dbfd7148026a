"""The body of a tool call, as it comes: {"name":"f","args":{...}} to a name and its arguments.

Arguments are passed on character by character as the model wrote them, never parsed and written
again. Torch-free; chat_output.py uses it.
"""

import json
import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

MAX_NAME: Final = 256
"""Characters of a function's name, here and in a history that is rendered."""
_MAX_FRAME = 4096
"""Characters around the arguments: with more, a body is no call but text."""
_SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_IN_VALUE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class CallEvent(NamedTuple):
    """start: the call of function `text` begins; arguments: more of them; text: this part of the
    body is no call, to be shown as text."""

    kind: Literal["start", "arguments", "text"]
    text: str


def is_function_name(name: str) -> bool:
    """Whether the history of a conversation may hold a call of this function."""
    if not 1 <= len(name) <= MAX_NAME or name.strip() != name:
        return False
    return name.isprintable() and not any("\ud800" <= char <= "\udfff" for char in name)


_State = Callable[[str, int, list[CallEvent]], int]


class CallReader:
    """One body. `author`: the name in front of it, which counts where the body has none (yet).

    A call starts with the first character of its arguments and not before, so that whatever is no
    call, or breaks off before them, leaves no name behind. `args` null or missing are `{}`. What
    does not fit becomes text: the whole body before the start, the rest of it after the arguments.
    """

    def __init__(self, author: str) -> None:
        self.is_started = False
        self.is_complete = False
        """Whether the arguments are there to their last brace."""
        self._author = author if is_function_name(author) else ""
        self._name = ""
        self._state: _State = self._open
        self._held: list[str] = []  # the part of the body that no event stands for yet
        self._num_held = 0
        self._key = ""
        self._literal: list[str] = []
        self._escaped = False
        self._had_args = False
        self._waiting: list[str] = []  # arguments that came before a name
        self._closers: list[str] = []
        self._in_string = False

    def push(self, text: str) -> list[CallEvent]:
        events: list[CallEvent] = []
        place = 0
        while place < len(text):
            place = self._state(text, place, events)
        return events

    def close(self) -> list[CallEvent]:
        """The block was ended by the model: what is left as text, if anything."""
        events: list[CallEvent] = []
        if not self.is_started or (self.is_complete and self._state != self._done):
            self._give_up(events)
        return events

    @property
    def unfinished(self) -> str:
        """The body so far, if its call has not started: what to keep of an output that breaks
        off."""
        return "" if self.is_started else "".join(self._held)

    # States: each takes characters of text from `place` on and returns the place after them.

    def _open(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {"{": self._first_key})

    def _first_key(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {'"': self._key_string, "}": self._done})

    def _next_key(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {'"': self._key_string})

    def _colon(self, text: str, place: int, events: list[CallEvent]) -> int:
        value = self._name_value if self._key == "name" else self._args_value
        return self._expect(text, place, events, {":": value})

    def _name_value(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {'"': self._name_string})

    def _after(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {",": self._next_key, "}": self._done})

    def _done(self, text: str, place: int, events: list[CallEvent]) -> int:
        return self._expect(text, place, events, {})

    def _text(self, text: str, place: int, events: list[CallEvent]) -> int:
        events.append(CallEvent("text", text[place:]))
        return len(text)

    def _key_string(self, text: str, place: int, events: list[CallEvent]) -> int:
        key = self._string(text[place], events)
        if key is not None:
            is_new = (key == "name" and not self._name) or (key == "args" and not self._had_args)
            self._key, self._state = key, self._colon
            if not is_new:
                self._give_up(events)
        return place + 1

    def _name_string(self, text: str, place: int, events: list[CallEvent]) -> int:
        name = self._string(text[place], events)
        if name is not None:
            self._name, self._state = name, self._after
            if not is_function_name(name):
                self._give_up(events)
            elif self._waiting:
                self._start(events)
                events.append(CallEvent("arguments", "".join(self._waiting)))
                self._waiting.clear()
        return place + 1

    def _args_value(self, text: str, place: int, events: list[CallEvent]) -> int:
        char = text[place]
        if char == "{":
            self._had_args = True
            self._closers.clear()
            self._start(events)
            self._state = self._args
            return place
        if not self._hold(char, events):
            return place + 1
        if char == "n":
            self._literal = [char]
            self._state = self._null
        elif char not in _SPACE:
            self._give_up(events)
        return place + 1

    def _null(self, text: str, place: int, events: list[CallEvent]) -> int:
        if not self._hold(text[place], events):
            return place + 1
        self._literal.append(text[place])
        literal = "".join(self._literal)
        if literal == "null":
            self._literal.clear()
            self._state = self._after  # as if there were none
        elif not "null".startswith(literal):
            self._give_up(events)
        return place + 1

    def _args(self, text: str, place: int, events: list[CallEvent]) -> int:
        """Inside the arguments: to their last brace, or all there is."""
        end = place
        while end < len(text) and (self._closers or end == place):
            end = self._scan(text, end)
            if self._state == self._broken:
                end = len(text)
        self._pass(text[place:end], events)
        if not self._closers and self._state == self._args:
            self.is_complete = True
            self._state = self._after
        return end

    def _broken(self, text: str, place: int, events: list[CallEvent]) -> int:
        """Brackets that do not match: nobody knows where these arguments end."""
        self._pass(text[place:], events)
        return len(text)

    def _scan(self, text: str, place: int) -> int:
        """The place after the next character of JSON's syntax, which is taken note of."""
        if self._escaped:
            self._escaped = False
            return place + 1
        found = (_IN_STRING if self._in_string else _IN_VALUE).search(text, place)
        if found is None:
            return len(text)
        char = found[0]
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = True
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif self._closers[-1] == char:
            self._closers.pop()
        else:
            self._state = self._broken
        return found.end()

    # Steps

    def _expect(
        self, text: str, place: int, events: list[CallEvent], next: dict[str, _State]
    ) -> int:
        """One character: white space, or one that leads to the next state, or the end of hope."""
        char = text[place]
        if not self._hold(char, events):
            return place + 1
        if char in next:
            self._state = next[char]
            if self._state == self._done and not self.is_started:
                self._end_without_args(events)
        elif char not in _SPACE:
            self._give_up(events)
        return place + 1

    def _end_without_args(self, events: list[CallEvent]) -> None:
        if not self._name:
            self._give_up(events)
            return
        self._start(events)
        events.append(CallEvent("arguments", "{}"))
        self.is_complete = True

    def _string(self, char: str, events: list[CallEvent]) -> str | None:
        """Takes a character of a key or name; the whole string at its closing quote."""
        if not self._hold(char, events):
            return None
        if char == '"' and not self._escaped:
            literal = "".join(self._literal)
            self._literal.clear()
            try:
                return json.loads(f'"{literal}"')
            except ValueError:
                self._give_up(events)
                return None
        self._escaped = char == "\\" and not self._escaped
        self._literal.append(char)
        return None

    def _start(self, events: list[CallEvent]) -> None:
        name = self._name or self._author
        if name and not self.is_started:
            self.is_started = True
            events.append(CallEvent("start", name))
        if self.is_started:
            self._forget()

    def _pass(self, text: str, events: list[CallEvent]) -> None:
        if self.is_started:
            events.append(CallEvent("arguments", text))
        else:
            self._waiting.append(text)
            self._held.append(text)

    def _hold(self, char: str, events: list[CallEvent]) -> bool:
        """Keeps a character; whether the body can still be a call."""
        self._held.append(char)
        self._num_held += 1
        if self._num_held > _MAX_FRAME:
            self._give_up(events)
        return self._num_held > 0

    def _give_up(self, events: list[CallEvent]) -> None:
        """Everything that no event stands for is text, and so is what follows."""
        if text := "".join(self._held):
            events.append(CallEvent("text", text))
        self._forget()
        self._state = self._text

    def _forget(self) -> None:
        self._held.clear()
        self._num_held = 0
