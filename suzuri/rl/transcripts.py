"""What was said, to read. No torch here."""

# pyright: strict

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from suzuri.envs.env import Trajectory
from suzuri.rl.drawing import Played

FOLDER = "transcripts"


def write_transcripts(
    folder: Path, step: int, played: Sequence[Played], decode: Callable[[Sequence[int]], str]
) -> None:
    """One line of JSON for each attempt at the given problems, in step-N.jsonl; the file is there
    whole or not at all."""
    path = folder / FOLDER / f"step-{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"step": step, "problem": place, "name": group.name, **_line(one, decode)})
        for place, group in enumerate(played)
        for one in group.trajectories
    ]
    new = path.with_suffix(".new")
    new.write_text("".join(line + "\n" for line in lines), "utf-8")
    new.replace(path)


def _line(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    known = 0
    for turn in trajectory.turns:
        # A prompt that goes on shows what is new in it.
        turns.append(
            {
                "prompt": decode(turn.prompt.tokens[known:]),
                "answer": decode(turn.answer.tokens),
                "finish": turn.answer.finish,
                "versions": sorted(set(turn.answer.versions)),
            }
        )
        known = len(turn.prompt.tokens) + len(turn.answer.tokens)
    found: dict[str, Any] = {"reward": trajectory.reward, "status": trajectory.status}
    if trajectory.error is not None:
        found["error"] = trajectory.error
    return found | {"turns": turns}
