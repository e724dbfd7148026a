"""What makes an answer right: pure functions of the messages an assistant wrote.

Strict on purpose, because they are rewards: the whole answer must be one of the accepted ones.
Nothing is searched for within it, so repeating, listing every answer, or writing a lot earns
nothing. Use with functools.partial, so that tasks can be pickled.
"""

from collections.abc import Sequence
from typing import Any

from suzuri.envs.task import Message, call_key, calls, canonical_json, strict_json


def calls_until_last(answer: Sequence[Message]) -> bool:
    """Whether the assistant said something, and called tools in all but its last message."""
    spoken = [turn for turn in answer if turn.get("role") == "assistant"]
    return bool(spoken) and all(turn.get("tool_calls") for turn in spoken[:-1])


def is_text(answer: Sequence[Message], accepted: tuple[str, ...], *, cased: bool = False) -> float:
    """1.0 if the last message says one of `accepted` and calls nothing.

    White space around it is ignored, and one full stop at its end, and unless `cased` whether ASCII
    letters are capitals. Look-alike characters are other characters.
    """
    text = _plain(answer[-1])
    if text is None:
        return 0.0
    return float(_folded(text, cased) in {_folded(item, cased) for item in accepted})


def is_json(answer: Sequence[Message], expected: str) -> float:
    """1.0 if the last message is JSON of the value `expected` (canonical JSON), and nothing else.

    Whole numbers are not fractions, true is not 1, no key stands twice. White space within is free
    up to the length of the value again, so that padding is no way to a longer answer.
    """
    text = _plain(answer[-1])
    if text is None or len(text) > 2 * len(expected) + 16:
        return 0.0
    value = strict_json(text)
    if value is NotImplemented:
        return 0.0
    return float(canonical_json(value) == expected)


def is_calls(answer: Sequence[Message], expected: tuple[str, ...]) -> float:
    """1.0 if the only message makes exactly the calls (as `call_key` spells them), in any order,
    and says nothing besides."""
    if len(answer) != 1:
        return 0.0
    return float(_makes(answer[0], expected))


def is_exchange(
    answer: Sequence[Message],
    rounds: tuple[tuple[str, ...], ...],
    accepted: tuple[str, ...],
) -> float:
    """1.0 if the assistant makes the calls of each round in turn and ends with an accepted text."""
    spoken = [message for message in answer if message.get("role") == "assistant"]
    if len(spoken) != len(rounds) + 1:
        return 0.0
    pairs = zip(spoken[:-1], rounds, strict=True)
    if not all(_makes(message, expected) for message, expected in pairs):
        return 0.0
    return is_text(answer, accepted)


def _makes(message: Message, expected: tuple[str, ...]) -> bool:
    if message.get("content"):
        return False
    found = calls(message)
    if found is None:
        return False
    return sorted(call_key(name, arguments) for _, name, arguments in found) == sorted(expected)


def _plain(message: Message) -> str | None:
    """The text of a message that has nothing but text and thoughts."""
    content: Any = message.get("content")
    if message.get("role") != "assistant" or message.get("tool_calls"):
        return None
    return content if isinstance(content, str) else None


def _folded(text: str, cased: bool) -> str:
    text = text.strip(" \n\t").removesuffix(".")
    if cased:
        return text
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)
