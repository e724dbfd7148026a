"""Several questions in one conversation: the earlier ones answered, the last one to answer."""

import dataclasses
import random

from suzuri.envs.generators import arithmetic, knowledge, small_talk, stories, strings
from suzuri.envs.generators.wording import pick_variant
from suzuri.envs.task import Message, Task

VARIANTS = {"two": 0.0, "three": 0.2, "five": 0.6, "recall": 0.1}
_TURNS = {"two": 1, "three": 2, "five": 4, "recall": 2}
_PARTS = (arithmetic.make, strings.make, knowledge.make, small_talk.make)


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """Turns of other kinds, one after the other; `recall` asks for a name told at the start."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    parts = [_part(rng, difficulty) for _ in range(_TURNS[variant])]
    if variant == "recall":
        opening, last = small_talk.name_told_and_asked(rng, difficulty)
        parts.insert(0, opening)
    elif rng.random() < 0.15:
        last = stories.make(rng, difficulty * 0.5)
    else:
        last = _part(rng, difficulty)
    history: list[Message] = []
    for part in parts:
        history += [*part.messages, *map(_without_thoughts, part.target)]
    return dataclasses.replace(
        last,
        kind="conversations",
        variant=variant,
        difficulty=difficulty,
        messages=(*history, *last.messages),
        earlier_keys=tuple(part.key for part in parts),
    )


def _part(rng: random.Random, difficulty: float) -> Task:
    """A turn that stands for itself: none that needs a system message in front."""
    while True:
        part = rng.choice(_PARTS)(rng, difficulty)
        if part.messages[0]["role"] == "user":
            return part


def _without_thoughts(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
