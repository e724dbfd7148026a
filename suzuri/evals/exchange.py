"""The turns of one task: what the model wrote, what its tools said, until it is over.

No torch here.
"""

# pyright: strict

from collections.abc import Callable, Sequence

from suzuri.envs.chat_prompts import read_message
from suzuri.envs.task import Message, Task

MAX_TURNS = 8
"""Of the model, in one task; an exchange that is longer is graded as it stands."""


class Exchange:
    """One attempt at a task."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.turns: list[Message] = []
        self.num_tokens = 0
        self.is_truncated = False
        self.is_over = False
        self._num_calls = 0

    @property
    def messages(self) -> list[Message]:
        """What the model is asked to go on from."""
        return [*self.task.messages, *self.turns]

    def take(
        self, token_ids: Sequence[int], finish: str | None, token_bytes: Callable[[int], bytes]
    ) -> None:
        """The model's next turn, which ended for the reason `finish` ("stop": by itself), and the
        answers of the tools that it called."""
        self.num_tokens += len(token_ids)
        self.is_truncated |= finish != "stop"
        message = read_message(
            token_ids, token_bytes, tools=bool(self.task.tools), first_call=self._num_calls
        )
        self._num_calls += len(message.get("tool_calls", ()))
        self.turns.append(message)
        replies = self.task.reply(message)
        asked = sum(1 for turn in self.turns if turn["role"] == "assistant")
        if self.is_truncated or not replies or asked >= MAX_TURNS:
            self.is_over = True
        else:
            self.turns += replies

    def fail(self) -> None:
        """No further turn is possible: the conversation does not fit any more."""
        self.is_truncated = self.is_over = True

    def score(self) -> float:
        return self.task.grade(self.turns) if self.turns else 0.0


def open_ones(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those that wait for a turn of the model."""
    return [one for one in exchanges if not one.is_over]
