"""Prompts from JSONL files with answers that can be checked. Read `Checkable`, then `read_prompts`.

A line: {"messages": [...] or "prompt": "...", "answer": ..., "grader": "exact", "extract": "all",
"tools": [...], "reasoning_effort": "low"}, of which the last four may be left out. No torch here.
"""

# pyright: strict

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, cast

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.task import Message, canonical_json, strict_json
from suzuri.envs.task_env import TaskGroup
from suzuri.envs.tools import Toolbox
from suzuri.processing.chat import effort_level
from suzuri.processing.json_lines import parse_object

KEYS = ("messages", "prompt", "answer", "grader", "extract", "tools", "reasoning_effort")
EXTRACTS = ("all", "last_line", "boxed")
MAX_TEXT = 20_000
"""Characters of an answer that a grader looks at; a longer one is wrong."""
MOST_NAMED = 20

Check = Callable[[str, Any], bool]


def exact(text: str, expected: Any) -> bool:
    """The text, white space around it aside."""
    return text.strip() == str(expected).strip()


def number(text: str, expected: Any) -> bool:
    """The same number however it is written: 1,200 and 1200.0, 1/2 and 0.5, 50%. Nothing else may
    stand beside it but a sign of currency or a full stop."""
    found, wanted = _fraction(text), _fraction(str(expected))
    return found is not None and found == wanted


def regex(text: str, expected: Any) -> bool:
    """All of the text matches the expression."""
    return re.fullmatch(str(expected), text.strip(), re.DOTALL) is not None


def json_value(text: str, expected: Any) -> bool:
    """JSON of that value and nothing else."""
    value = strict_json(text.strip())
    return value is not NotImplemented and canonical_json(value) == canonical_json(expected)


CHECKS: dict[str, Check] = {"exact": exact, "number": number, "regex": regex, "json": json_value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkable:
    """A prompt whose answer can be checked; what environments need of a `Task`."""

    messages: tuple[Message, ...]
    answer: Any
    grader: str = "exact"
    extract: str = "all"
    tools: tuple[Message, ...] = ()
    effort: float | None = None
    kind: str = "prompts"
    variant: str = "file"

    def reply(self, answer: Message) -> tuple[Message, ...]:
        """Nobody answers calls."""
        del answer
        return ()

    def grade(self, answer: Sequence[Message]) -> float:
        """1.0 where the last message says, in the place meant, what it should, and all before it
        called tools; else 0.0."""
        spoken = [turn for turn in answer if turn.get("role") == "assistant"]
        if not spoken or answer[-1] is not spoken[-1] or answer[-1].get("tool_calls"):
            return 0.0
        if not all(turn.get("tool_calls") for turn in spoken[:-1]):
            return 0.0
        content: object = answer[-1].get("content")
        if not isinstance(content, str) or len(content) > MAX_TEXT:
            return 0.0
        said = extracted(content, self.extract)
        return float(said is not None and CHECKS[self.grader](said, self.answer))


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
    """The problems of files, in their order. Raises ValueError that lists the lines that cannot be
    used, OSError for files that cannot be read."""

    def __init__(
        self, paths: Sequence[str], prompts: ChatPrompts, *, toolbox: Toolbox | None = None
    ) -> None:
        self._tasks = read_prompts(paths)
        self._prompts, self._toolbox = prompts, toolbox

    @property
    def size(self) -> int | None:
        return len(self._tasks)

    def group(self, index: int) -> TaskGroup:
        return TaskGroup(self._tasks[index], self._prompts, self._toolbox)


def read_prompts(paths: Sequence[str]) -> list[Checkable]:
    """All lines of the files; blank ones do not count."""
    found: list[Checkable] = []
    faults: list[str] = []
    for path in paths:
        with open(path, "rb") as lines:
            for place, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    found.append(_parsed(line))
                except ValueError as error:
                    faults.append(f"{path}:{place}: {error}")
    if faults:
        more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
        raise ValueError("\n  ".join(["these cannot be used:", *faults[:MOST_NAMED], *more]))
    if not found:
        raise ValueError(f"{', '.join(paths)}: no line, so nothing to practise")
    return found


def _parsed(line: bytes) -> Checkable:
    fields = parse_object(line, KEYS)
    if ("messages" in fields) == ("prompt" in fields):
        raise ValueError("give either messages or prompt")
    if "answer" not in fields:
        raise ValueError("no answer to check against")
    messages = fields.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": fields["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list that is not empty")
    grader, extract = fields.get("grader", "exact"), fields.get("extract", "all")
    if grader not in CHECKS:
        raise ValueError(f"grader {grader!r}: there are {', '.join(CHECKS)}")
    if extract not in EXTRACTS:
        raise ValueError(f"extract {extract!r}: there are {', '.join(EXTRACTS)}")
    _refuse_unanswerable(grader, fields["answer"])
    effort = fields.get("reasoning_effort")
    return Checkable(
        messages=tuple(cast("list[Message]", messages)),
        answer=fields["answer"],
        grader=grader,
        extract=extract,
        tools=tuple(fields.get("tools") or ()),
        effort=None if effort is None else effort_level(effort),
    )


def _refuse_unanswerable(grader: str, answer: Any) -> None:
    if grader == "number" and _fraction(str(answer)) is None:
        raise ValueError(f"answer {answer!r} is no number")
    if grader == "regex":
        try:
            re.compile(str(answer))
        except re.error as error:
            raise ValueError(f"answer {answer!r} is no regular expression ({error})") from error
    if grader == "exact" and not str(answer).strip():
        raise ValueError("answer is empty")


def _fraction(text: str) -> Fraction | None:
    """The number that is written, exactly; None for what is none."""
    text = text.strip().removesuffix(".").strip("$€£ ").replace("\N{MINUS SIGN}", "-")
    scale = 1
    if text.endswith("%"):
        text, scale = text[:-1].rstrip(), 100
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if len(text) > 200 or not re.fullmatch(
        r"[+-]?(\d+/\d+|\d+\.?\d*([eE][+-]?\d{1,3})?|\.\d+)", text, re.ASCII
    ):
        return None
    try:
        return Fraction(text) / scale
    except ZeroDivisionError:
        return None
