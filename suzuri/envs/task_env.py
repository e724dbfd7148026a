"""The environment of a `Task`, or what is like one: its tools answer, its grader scores all of it.

No torch here.
"""

# pyright: strict

import dataclasses
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Env, Outcome, Trajectory
from suzuri.envs.task import Message, Task
from suzuri.envs.tools import Toolbox
from suzuri.types import Answer, Prompt


class Gradable(Protocol):
    """What an environment needs of a `Task`."""

    @property
    def kind(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, object]]: ...

    @property
    def effort(self) -> float | None: ...

    def reply(self, answer: Message) -> tuple[Message, ...]: ...

    def grade(self, answer: Sequence[Message]) -> float | Awaitable[float]:
        """The reward of what was said after `messages`; to be awaited where finding it takes
        time."""
        ...


class TaskEnv:
    """One attempt. The reward is the grader's score; an answer that did not end by itself has none
    of it (0). `toolbox`: tools that run, beside those that the task answers itself."""

    def __init__(
        self, task: Gradable, prompts: ChatPrompts, toolbox: Toolbox | None = None
    ) -> None:
        self._task, self._prompts, self._toolbox = task, prompts, toolbox
        self._tools = [*task.tools, *(toolbox.declarations if toolbox is not None else ())]
        self._turns: list[Message] = []
        self._prompt: Prompt | None = None
        self._num_calls = 0

    async def initial(self) -> Prompt:
        if self._prompt is not None:
            raise RuntimeError("an environment is used once")
        task = self._task
        self._prompt = self._prompts.first(task.messages, self._tools, task.effort)
        return self._prompt

    async def step(self, answer: Answer) -> Outcome:
        task = self._task
        if self._prompt is None:
            raise RuntimeError("initial comes first")
        if answer.finish != "stop":
            return Outcome(reward=0.0)
        message = self._prompts.message(answer, tools=bool(self._tools), first_call=self._num_calls)
        self._turns.append(message)
        self._num_calls += len(message.get("tool_calls", ()))
        replies = task.reply(message)
        if not replies and self._toolbox is not None:
            replies = await self._toolbox.replies(message)
        if not replies:
            reward: Any = task.grade(self._turns)
            return Outcome(reward=await reward if inspect.isawaitable(reward) else reward)
        said = [*task.messages, *self._turns]
        self._prompt = self._prompts.after(
            self._prompt, answer, said, replies, self._tools, task.effort
        )
        self._turns += replies
        return Outcome(prompt=self._prompt)


class TaskGroup:
    """Attempts at one task, each judged by itself."""

    def __init__(
        self, task: Gradable, prompts: ChatPrompts, toolbox: Toolbox | None = None
    ) -> None:
        self._task, self._prompts, self._toolbox = task, prompts, toolbox
        self.name = f"{task.kind}/{task.variant}"

    def envs(self, count: int) -> Sequence[Env]:
        return [TaskEnv(self._task, self._prompts, self._toolbox) for _ in range(count)]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0] * len(trajectories)


class TaskStream(Protocol):
    """`Mixture`, or what is like one. `size`: tasks there are; None: without end."""

    @property
    def size(self) -> int | None: ...

    def task(self, position: int) -> Task: ...


class TaskProblems:
    """The problems of a stream of tasks. `open_effort`: no effort is given, whatever a task's own,
    so that it is the model that decides whether it thinks."""

    def __init__(
        self, stream: TaskStream, prompts: ChatPrompts, *, open_effort: bool = False
    ) -> None:
        self._stream, self._prompts, self._open_effort = stream, prompts, open_effort

    @property
    def size(self) -> int | None:
        return self._stream.size

    def group(self, index: int) -> TaskGroup:
        task = self._stream.task(index)
        if self._open_effort:
            task = dataclasses.replace(task, effort=None)
        return TaskGroup(task, self._prompts)
