"""What the generators share: how a question is put, and how much is thought about it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from suzuri.envs.task import NO_THOUGHT, Message

FULL_THOUGHT = 0.45
"""From this effort on thoughts go step by step; below, they are one short line."""

_GREETINGS = ("Hi! ", "Hello. ", "Hey, ", "Please: ", "Quick question: ", "Now, ", "Tell me: ")


def pick_variant(
    rng: random.Random, variants: Mapping[str, float], difficulty: float, wanted: str | None
) -> str:
    """The wanted variant, or one of those that this difficulty includes."""
    if wanted is not None:
        if wanted not in variants:
            raise ValueError(f"no variant {wanted!r}; there are {', '.join(variants)}")
        return wanted
    return rng.choice([name for name, least in variants.items() if least <= difficulty])


def pick_effort(rng: random.Random) -> float | None:
    """An effort as people set them: the named levels mostly; None: nothing said about it."""
    band = rng.random()
    if band < 0.28:
        return rng.choice((0.0, 0.0, 0.0, 0.1, 0.05))
    if band < 0.48:
        return rng.choice((0.2, 0.2, 0.2, 0.15, 0.25, 0.3, 0.35, 0.4))
    if band < 0.92:
        return rng.choice((0.9, 0.9, 0.9, 0.7, 0.7, 0.99, 0.5, 0.6, 0.8, 0.45, 0.95))
    return None


def thought(rng: random.Random, effort: float | None, short: str, full: str) -> str:
    """The thoughts that go with an effort: none, one line, or all steps. Without an effort any of
    them: it is open, and RL can teach when it pays to think."""
    if effort is None:
        return rng.choices(("", short, full), (5, 2, 3))[0]
    if effort >= FULL_THOUGHT:
        return full
    return "" if effort <= NO_THOUGHT else short


def ask(rng: random.Random, templates: Sequence[str], *values: object, **slots: object) -> str:
    """One of the templates, filled in, sometimes typed carelessly. Templates start with words of
    their own, never with a slot."""
    return careless(rng, rng.choice(templates).format(*values, **slots))


def careless(rng: random.Random, text: str) -> str:
    """Now and then a greeting in front, no capital, no mark at the end."""
    draw = rng.random()
    if draw < 0.06:
        return rng.choice(_GREETINGS) + text
    if draw < 0.16:
        text = text[0].lower() + text[1:]
    if 0.1 < draw < 0.22 and text[-1] in "?.!":
        text = text[:-1]
    return text


def user(content: str | list[Message]) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def calling(
    made: Sequence[tuple[str, Mapping[str, Any]]], reasoning: str = "", first: int = 0
) -> Message:
    """An assistant message with these calls, numbered from `first`."""
    items: list[Message] = [
        {
            "id": f"call_{first + index}",
            "type": "function",
            "function": {"name": name, "arguments": dict(arguments)},
        }
        for index, (name, arguments) in enumerate(made)
    ]
    message: Message = {"role": "assistant", "content": None, "tool_calls": items}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def listed(items: Sequence[str]) -> str:
    """a, b and c"""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def with_article(words: str) -> str:
    """a red ball, an orange ball"""
    return f"{'an' if words[0] in 'aeio' else 'a'} {words}"
