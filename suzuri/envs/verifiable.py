"""Prompts from JSONL files with answers that can be checked. Read `Checkable`, then `read_prompts`.

A line: {"messages": [...] or "prompt": "...", "answer": ..., "grader": "exact", "extract": "all",
"tools": [...], "reasoning_effort": "low"}, of which the last four may be left out; "reward":
"package.module:function" may stand in place of "grader" and "extract". No torch here.
"""

# pyright: strict

import dataclasses
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.checks import CHECKS, MAY_NOT_END, refusal
from suzuri.envs.dotted import NamedReward
from suzuri.envs.graders import calls_until_last
from suzuri.envs.math_answers import is_plain
from suzuri.envs.task import Message
from suzuri.envs.task_env import TaskGroup
from suzuri.envs.tools import Toolbox
from suzuri.envs.workers import CallLimits, WorkerError, Workers
from suzuri.processing.chat import effort_level
from suzuri.processing.json_lines import BOM, in_folder, parse_object

KEYS = (
    "messages", "prompt", "answer", "grader", "extract", "reward", "tools", "reasoning_effort",
)  # fmt: skip
EXTRACTS = ("all", "last_line", "boxed")
MAX_TEXT = 20_000
"""Characters of an answer that a grader looks at; a longer one is wrong."""
MOST_NAMED = 20


@dataclasses.dataclass(frozen=True)
class Judges:
    """What grades beside this process: `workers` the graders that may not end, `rewards` by their
    paths. `limits`: what the former may take."""

    workers: Workers = dataclasses.field(
        default_factory=lambda: Workers(["suzuri.envs.checks"], memory_mb=4096)
    )
    rewards: dict[str, NamedReward] = dataclasses.field(default_factory=dict[str, NamedReward])
    limits: CallLimits = dataclasses.field(default_factory=CallLimits)
    reward_seconds: float = 20.0

    def reward(self, path: str) -> NamedReward:
        """Raises ValueError for what is missing."""
        if path not in self.rewards:
            self.rewards[path] = NamedReward(path, seconds=self.reward_seconds)
        return self.rewards[path]

    async def is_answer(self, grader: str, text: str, expected: Any) -> float:
        """1.0 or 0.0. A text over which a grader breaks its limits is no answer: it is the text's
        fault, and must not be a way out of being wrong."""
        call = ("suzuri.envs.checks:is_answer", grader, text, expected)
        try:
            return float(await self.workers.call(*call, limits=self.limits))
        except (TimeoutError, WorkerError):
            return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkable:
    """A prompt whose answer can be checked; what environments need of a `Task`. `reward`: the path
    of a function that says what an answer is worth, in place of the grader."""

    messages: tuple[Message, ...]
    answer: Any
    grader: str = "exact"
    extract: str = "all"
    reward: str | None = None
    tools: tuple[Message, ...] = ()
    effort: float | None = None
    judges: Judges = dataclasses.field(default_factory=Judges, repr=False, compare=False)
    kind: str = "prompts"
    variant: str = "file"

    def reply(self, answer: Message) -> tuple[Message, ...]:
        """Nobody answers calls."""
        del answer
        return ()

    def grade(self, answer: Sequence[Message]) -> float | Awaitable[float]:
        """1.0 where the last message says, in the place meant, what it should, and all before it
        called tools; else 0.0. Or what the function at `reward` finds."""
        if self.reward is not None:
            return self.judges.reward(self.reward)(self.messages, answer, self.answer)
        said = self._said(answer)
        if said is None:
            return 0.0
        if self.grader in MAY_NOT_END:
            return self.judges.is_answer(self.grader, said, self.answer)
        return float(CHECKS[self.grader](said, self.answer))

    def _said(self, answer: Sequence[Message]) -> str | None:
        last = answer[-1] if answer else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return None
        if not calls_until_last(answer):
            return None
        content: object = last.get("content")
        if not isinstance(content, str) or len(content) > MAX_TEXT:
            return None
        return extracted(content, self.extract)


def extracted(text: str, extract: str) -> str | None:
    r"""Where the answer stands: all of the text, its last line that is not empty, or what is in the
    only \boxed{}. None where it stands nowhere, or in two places: that is no answer."""
    if extract == "all":
        return text
    if extract == "last_line":
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None
    starts = [match.end() for match in re.finditer(r"\\boxed\{", text)]
    if len(starts) != 1:
        return None
    depth = 1
    for place in range(starts[0], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[0] : place]
    return None


class JsonlProblems:
    """The problems of files, in their order, their media in the folders of the files. `reward`: of
    lines that name neither a grader nor a reward; one may take `reward_seconds`.

    Raises ValueError that lists the lines that cannot be used, OSError for files that cannot be
    read.
    """

    def __init__(
        self,
        paths: Sequence[str],
        prompts: ChatPrompts,
        *,
        toolbox: Toolbox | None = None,
        reward: str | None = None,
        reward_seconds: float = 20.0,
    ) -> None:
        judges = Judges(reward_seconds=reward_seconds)
        extra = toolbox.declarations if toolbox is not None else ()

        def check(task: Checkable) -> None:
            prompts.first(task.messages, [*task.tools, *extra], task.effort)

        self._tasks = read_prompts(paths, judges, reward=reward, check=check)
        self.digest = _digest(paths)
        self._prompts, self._toolbox = prompts, toolbox

    @property
    def size(self) -> int | None:
        return len(self._tasks)

    def group(self, index: int) -> TaskGroup:
        return TaskGroup(self._tasks[index], self._prompts, self._toolbox)


def _digest(paths: Sequence[str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def read_prompts(
    paths: Sequence[str],
    judges: Judges | None = None,
    *,
    reward: str | None = None,
    check: Callable[[Checkable], None] | None = None,
) -> list[Checkable]:
    """All lines of the files; blank ones do not count. `check` raises ValueError for what else is
    wrong with one."""
    judges = judges or Judges()
    found: list[Checkable] = []
    faults: list[str] = []
    for path in paths:
        with open(path, "rb") as lines:
            for place, line in enumerate(lines, 1):
                if not line.strip(BOM + b" \t\r\n"):
                    continue
                try:
                    task = _parsed(line, Path(path).parent, judges, reward)
                    if check is not None:
                        check(task)
                    found.append(task)
                except ValueError as error:
                    faults.append(f"{path}:{place}: {error}")
    if faults:
        more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
        raise ValueError("\n  ".join(["these cannot be used:", *faults[:MOST_NAMED], *more]))
    if not found:
        raise ValueError(f"{', '.join(paths)}: no line, so nothing to practise")
    return found


def _parsed(line: bytes, folder: Path, judges: Judges, default: str | None) -> Checkable:
    fields = parse_object(line, KEYS)
    if ("messages" in fields) == ("prompt" in fields):
        raise ValueError("give either messages or prompt")
    if "reward" in fields and ("grader" in fields or "extract" in fields):
        raise ValueError("give either reward, or grader and extract")
    is_graded = "grader" in fields or "extract" in fields
    reward: object = None if is_graded else fields.get("reward", default)
    if reward is not None:
        if not isinstance(reward, str):
            raise ValueError(f'reward {reward!r}: must be "package.module:function"')
        judges.reward(reward)
    elif "answer" not in fields:
        raise ValueError("no answer to check against")
    effort = fields.get("reasoning_effort")
    return Checkable(
        messages=_messages(fields, folder),
        answer=fields.get("answer"),
        reward=reward,
        tools=tuple(_listed(fields.get("tools", []), "tools")),
        effort=None if effort is None else effort_level(effort),
        judges=judges,
        **({} if reward is not None else _graded(fields, judges)),
    )


def _messages(fields: dict[str, Any], folder: Path) -> tuple[Message, ...]:
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str) or not fields["prompt"].strip():
            raise ValueError("prompt must be a text that is not empty")
        return ({"role": "user", "content": fields["prompt"]},)
    messages = _listed(fields["messages"], "messages")
    if not messages:
        raise ValueError("messages must be a list that is not empty")
    return tuple(in_folder(message, folder) for message in messages)


def _listed(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return cast("list[Any]", value)


def _graded(fields: dict[str, Any], judges: Judges) -> dict[str, str]:
    grader, extract = fields.get("grader", "exact"), fields.get("extract", "all")
    if grader not in CHECKS:
        raise ValueError(f"grader {grader!r}: there are {', '.join(CHECKS)}")
    if extract not in EXTRACTS:
        raise ValueError(f"extract {extract!r}: there are {', '.join(EXTRACTS)}")
    said = _refusal(grader, fields["answer"], judges)
    if said is not None:
        raise ValueError(said)
    return {"grader": grader, "extract": extract}


def _refusal(grader: str, answer: Any, judges: Judges) -> str | None:
    if grader != "math":
        return refusal(grader, answer)
    if is_plain(str(answer)):
        return None
    try:
        return judges.workers.call_now("suzuri.envs.checks:refusal", grader, answer)
    except (TimeoutError, WorkerError) as error:
        return f"answer {str(answer)[:60]!r} cannot be read as mathematics: {error}"
