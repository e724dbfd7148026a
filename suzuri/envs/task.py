"""One task: a conversation to answer, the answer a good model writes, and a grader.

Read next: graders.py. A task is plain data (its media are data: URLs), so it can be pickled, sent
to a server or written as a line of JSON.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

Message = dict[str, Any]
"""A chat message in OpenAI's form."""
Split = Literal["train", "held_out"]
Grader = Callable[[Sequence[Message]], float]
"""From the messages that follow the task's to a score from 0 to 1. Pure; never raises."""

HELD_OUT_SHARE = 10
"""One key in so many is held out."""
NO_THOUGHT = 0.1
"""Up to this effort an answer must come without thoughts."""
MAX_DRAWS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """`messages` (never ending with an assistant's), `tools` and `effort` make the prompt; `target`
    follows them: one assistant message, or with `replies` an exchange that ends with one.

    `key` says what is asked regardless of the wording; it alone decides the split. A conversation
    also has the keys of its answered turns, `earlier_keys`: it is for training only if all are.
    `replies`: the result of each call that the environment answers, by `call_key`.
    Only `target` is to be learned: earlier turns of the assistant have lost their thoughts.
    """

    kind: str
    variant: str
    difficulty: float
    key: str
    messages: tuple[Message, ...]
    target: tuple[Message, ...]
    grader: Grader
    effort: float | None = None
    tools: tuple[Message, ...] = ()
    replies: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    earlier_keys: tuple[str, ...] = ()

    @property
    def split(self) -> Split | None:
        """None: a conversation that may be used in neither."""
        own = split_of(self.key)
        if own == "train" and any(split_of(key) != "train" for key in self.earlier_keys):
            return None
        return own

    def grade(self, answer: Message | Sequence[Message]) -> float:
        """The score of an assistant message, or of the whole exchange after `messages`.

        0.0 for what is no such exchange: a role other than the assistant's, results of tools that
        the environment did not give, thoughts where the effort asks for none, an unfinished one.
        """
        turns = [answer] if isinstance(answer, Mapping) else list(answer)
        if not turns or not all(map(_is_message, turns)) or not self._is_honest(turns):
            return 0.0
        if self.effort is not None and self.effort <= NO_THOUGHT and any(map(thoughts, turns)):
            return 0.0
        return self.grader(turns)

    def reply(self, answer: Message) -> tuple[Message, ...]:
        """What the environment says to an assistant message: the result of each call. Empty: the
        task is over."""
        if not self.replies:
            return ()
        found = calls(answer)
        if found is None:
            return ()
        return tuple(
            {
                "role": "tool",
                "tool_call_id": str(call.get("id")),
                "name": name,
                "content": self.replies.get(call_key(name, arguments), UNKNOWN_CALL),
            }
            for call, name, arguments in found
        )

    def _is_honest(self, turns: list[Message]) -> bool:
        index = 0
        while index < len(turns):
            if turns[index].get("role") != "assistant":
                return False
            expected = list(self.reply(turns[index]))
            is_last = index + 1 == len(turns)
            if is_last:
                return not expected
            if not expected or turns[index + 1 : index + 1 + len(expected)] != expected:
                return False
            index += 1 + len(expected)
        return False


UNKNOWN_CALL = '{"error":"not found"}'
"""What a tool says to arguments that the task does not know."""


class Generator(Protocol):
    """Makes a task from random numbers and a difficulty of 0 to 1; equal states, equal tasks."""

    def __call__(
        self, rng: random.Random, difficulty: float, variant: str | None = None
    ) -> Task: ...


def split_of(key: str) -> Split:
    """The side a key is on, the same on every machine and for ever."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % HELD_OUT_SHARE else "held_out"


def draw(
    make: Generator,
    rng: random.Random,
    difficulty: float,
    split: Split,
    variant: str | None = None,
) -> Task:
    """The first task of that split that comes from the random numbers."""
    for _ in range(MAX_DRAWS):
        task = make(rng, difficulty, variant)
        if task.split == split:
            return task
    raise ValueError(f"no {split} task in {MAX_DRAWS} draws at difficulty {difficulty}; raise it")


def calls(message: Message) -> list[tuple[Message, str, dict[str, Any]]] | None:
    """(call, name, arguments) of each call of a message; None if there is none, or a broken one."""
    raw = message.get("tool_calls")
    if not isinstance(raw, list | tuple) or not raw:
        return None
    found: list[tuple[Message, str, dict[str, Any]]] = []
    for item in cast("Sequence[Any]", raw):
        function = item.get("function") if isinstance(item, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(function, dict):
            return None
        fields = cast("Message", function)
        arguments: object = fields.get("arguments")
        if isinstance(arguments, str):
            arguments = strict_json(arguments)
        if not isinstance(fields.get("name"), str) or not isinstance(arguments, dict):
            return None
        found.append((cast("Message", item), fields["name"], cast("dict[str, Any]", arguments)))
    return found


def _is_message(turn: object) -> bool:
    return isinstance(turn, Mapping)


def thoughts(message: Message) -> str:
    """The reasoning of a message under either of its names."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """One spelling for equal calls: 1, 1.0 and true stay apart."""
    return name + canonical_json(arguments)


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def strict_json(text: str) -> object:
    """The value of a JSON text, or `NotImplemented`, which is no JSON value, where it is none, says
    a key twice, or has NaN or an infinity."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NotImplemented


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
