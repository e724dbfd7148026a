"""Scores with their standard errors, as a table and as data. No torch here."""

# pyright: strict

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from suzuri.evals.exchange import Exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of task. `score`: mean over tasks of the mean over their answers; `error`: its
    standard error over tasks; `truncated`: share of answers that ran into a limit."""

    name: str
    count: int
    score: float
    error: float
    truncated: float
    mean_tokens: float
    transcripts: list[dict[str, Any]]

    @classmethod
    def of(cls, name: str, group: Sequence[Exchange], samples: int) -> "Line":
        """From the answers of one kind, those to one task next to each other."""
        scores = [one.score() for one in group]
        means = [statistics.fmean(scores[i : i + samples]) for i in range(0, len(scores), samples)]
        spread = statistics.stdev(means) if len(means) > 1 else 0.0
        return cls(
            name=name,
            count=len(means),
            score=statistics.fmean(means),
            error=spread / math.sqrt(len(means)),
            truncated=statistics.fmean(float(one.is_truncated) for one in group),
            mean_tokens=statistics.fmean(one.num_tokens for one in group),
            transcripts=[
                {
                    "key": one.task.key,
                    "messages": [_without_media(m) for m in one.task.messages],
                    "answer": one.turns,
                    "target": list(one.task.target),
                    "score": score,
                }
                for one, score in zip(group, scores, strict=True)
            ],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`accepted_length`: mean number of draft tokens that greedy decoding would accept behind each
    token, or None."""

    model: str
    settings: dict[str, Any]
    lines: list[Line]
    seconds: float
    tokens: int
    accepted_length: float | None


def show(report: Report, console: Console, wrong: int) -> None:
    """The table, and so many wrong answers of each kind."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("tasks", "score", "standard error", "count", "truncated", "tokens"):
        table.add_column(name, justify="left" if name == "tasks" else "right")
    for line in report.lines:
        table.add_row(
            line.name,
            f"{100 * line.score:.1f} %",
            f"{100 * line.error:.1f}",
            str(line.count),
            f"{100 * line.truncated:.0f} %",
            f"{line.mean_tokens:.0f}",
        )
    console.print(table)
    for line in report.lines:
        bad = [one for one in line.transcripts if one["score"] < 1][:wrong]
        for one in bad:
            console.print(f"{line.name}: {one['messages'][-1].get('content')!r}", markup=False)
            console.print(f"  said   {_words(one['answer'])!r}", markup=False)
            console.print(f"  wanted {_words(one['target'])!r}", markup=False)


def summary(report: Report) -> str:
    """The last line."""
    rate = report.tokens / report.seconds if report.seconds else 0.0
    mean = statistics.fmean(line.score for line in report.lines)
    drafts = ""
    if report.accepted_length is not None:
        drafts = f", {report.accepted_length:.2f} draft tokens accepted on average"
    return (
        f"{len(report.lines)} kinds, mean score {100 * mean:.1f} %, {report.tokens} tokens in "
        f"{report.seconds:.1f} s ({rate:.0f}/s){drafts}"
    )


def _words(turns: Sequence[dict[str, Any]]) -> list[Any]:
    return [turn.get("tool_calls") or turn.get("content") for turn in turns]


def _without_media(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose pictures and clips are named, not held."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:  # pyright: ignore[reportUnknownVariableType]
        kind: Any = part.get("type") if isinstance(part, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        parts.append(part if kind == "text" else {"type": kind})
    return {**message, "content": parts}
