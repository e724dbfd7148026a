"""Pictures of one or two shapes, to be described however one is asked. No torch here."""

# pyright: strict

import dataclasses
import functools

from suzuri.envs.mixture import Mixture
from suzuri.envs.task import Message, Split, Task

DIFFICULTY = 0.3
WORDINGS = (
    "What is this?",
    "What is shown?",
    "What is on the picture?",
    "What can be seen here?",
    "Which thing is this?",
    "Look. What is it?",
    "And this?",
    "Name it.",
    "What have I drawn?",
    "Give me a description.",
)
"""None of them is among those that nano learned from: it takes some to ask for the shape alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureNames:
    """A stream of tasks as `Mixture` is one: place i is the same task everywhere. Right is what
    names each shape with its colour, and nothing else. Raises ValueError naming the field."""

    seed: int = 0
    split: Split = "train"
    wordings: tuple[str, ...] = WORDINGS
    effort: float | None = 0.0

    def __post_init__(self) -> None:
        if not self.wordings:
            raise ValueError("wordings: give one at least")
        _ = self._scenes  # which looks at the others

    @property
    def size(self) -> int | None:
        """Without end."""
        return None

    def task(self, position: int) -> Task:
        """The task at a place from 0 on."""
        task = self._scenes.task(position)
        wording = self.wordings[position % len(self.wordings)]
        question = task.messages[-1]
        content = [_said(part, wording) for part in question["content"]]
        messages = (*task.messages[:-1], {**question, "content": content})
        return dataclasses.replace(task, messages=messages, effort=self.effort)

    @functools.cached_property
    def _scenes(self) -> Mixture:
        ends = (DIFFICULTY, DIFFICULTY)
        return Mixture.of("pictures/describe", ends, seed=self.seed, split=self.split)


def _said(part: Message, wording: str) -> Message:
    return {**part, "text": wording} if part["type"] == "text" else part
