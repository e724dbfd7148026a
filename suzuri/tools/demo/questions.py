"""What is asked: tasks of the generators from their held-out side, and a sum for the calculator."""

import base64
import dataclasses
import random
from typing import Any, Literal

from suzuri.envs.generators.tool_catalogue import TOOLS
from suzuri.envs.mixture import Mixture
from suzuri.envs.task import Message, Task, split_of
from suzuri.processing.media import data_url_bytes
from suzuri.tools.demo.tools import calculate

DIFFICULTY = 0.4
THINKING = 0.9
AT_ONCE = 0.0
"""Efforts: with every step written down, and without thoughts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """`task` asks it and grades the answer. `text` and `media` (a PNG or a WAV file): its parts."""

    title: str
    needs: Literal["vision", "audio"] | None
    task: Task

    @property
    def text(self) -> str:
        content = self.task.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return next(part["text"] for part in content if part["type"] == "text")

    @property
    def media(self) -> bytes | None:
        content = self.task.messages[-1]["content"]
        parts: list[Message] = [] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "image_url":
                return data_url_bytes(part["image_url"]["url"])
            if part["type"] == "input_audio":
                return base64.b64decode(part["input_audio"]["data"])
        return None

    @property
    def expected(self) -> str:
        return str(self.task.target[-1]["content"])


def questions(seed: int) -> list[Question]:
    """One of text, one of a picture and one of a sound."""
    return [
        Question(
            title="a question, with thoughts",
            needs=None,
            task=_task("arithmetic/add2", seed, THINKING),
        ),
        Question(title="a picture", needs="vision", task=_task("pictures/describe", seed, AT_ONCE)),
        Question(title="a sound", needs="audio", task=_task("sounds/direction", seed, AT_ONCE)),
    ]


def _task(name: str, seed: int, effort: float) -> Task:
    stream = Mixture.of(name, (DIFFICULTY, DIFFICULTY), seed=seed, split="held_out")
    return dataclasses.replace(stream.task(0), effort=effort)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """A question for the calculator."""

    text: str
    expression: str
    value: str

    def is_right(self, calls: list[tuple[str, Any]], answer: Message) -> bool:
        """Whether the calculator was asked for this, and its result was told."""
        asked = [("calculate", {"expression": self.expression})]
        words = str(answer.get("content") or "").replace(",", "").rstrip(".").split()
        return calls == asked and self.value in words


def sum_for_the_calculator(seed: int) -> Sum:
    """One that training has not seen."""
    rng = random.Random(seed)
    tool = next(tool for tool in TOOLS if tool.names[0] == "calculate")
    while True:
        expression = f"{rng.randint(100, 999)}{rng.choice('+-*')}{rng.randint(11, 99)}"
        if split_of(f"tools:calculate({expression})") == "held_out":
            text = rng.choice(tool.requests).format(expression=expression)
            return Sum(text=text, expression=expression, value=str(calculate(expression)["value"]))
