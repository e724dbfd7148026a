"""What a run shows, on a terminal and elsewhere."""

import io
from typing import Any

import pytest
from rich.console import Console

from suzuri.rl.table import COLUMNS, ROWS, RunTable


def line(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "sample/reward": 0.25,
        "kl/sampler_trainer_max": 0.0,
        "answers/count": 8,
        "answers/tokens:mean": 12.34,
        "answers/truncated": 2,
        "groups/count": 4,
        "groups/flat": 1,
        "time/tokens_per_s": 1234.5,
        "time/sample_seconds": 1.0,
        "time/train_seconds": 2.0,
        "time/publish_seconds": 0.5,
    } | fields


def drawn(table: RunTable) -> list[str]:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(table.render())
    file: Any = console.file
    return [text.rstrip() for text in file.getvalue().splitlines()]


def test_the_newest_steps_and_the_last_evaluation_are_shown() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=120, force_terminal=True, color_system=None)
    table = RunTable(console)
    with table.running("learning", 40, 0):
        table.show({"step": 0, "eval/reward": 0.125, "eval/standard_error": 0.05})
        assert drawn(table)[2] == "held out after step 0: 0.125 +- 0.050"
        for step in range(1, ROWS + 4):
            table.show(line(step))
        table.show(line(ROWS + 4, **{"eval/reward": 0.5, "eval/standard_error": 0.0625}))
        shown = drawn(table)
    assert shown[0].split() == " ".join(COLUMNS).split()
    rows = [text.split() for text in shown[1 : ROWS + 1]]
    assert [row[0] for row in rows] == [str(step) for step in range(5, ROWS + 5)]
    assert rows[0][1:] == ["0.250", "0", "12.3", "25%", "25%", "1,234", "1.00", "2.00", "0.50", "-"]
    assert rows[-1][-1] == "0.500"
    assert shown[ROWS + 1].startswith(f"step {ROWS + 4} of 40, ") and "to go" in shown[ROWS + 1]
    assert shown[ROWS + 2] == f"held out after step {ROWS + 4}: 0.500 +- 0.062"
    assert "held out after step 16: 0.500" in screen.getvalue()


def test_a_step_of_which_nothing_came_is_shown_as_well() -> None:
    table = RunTable(Console(file=io.StringIO(), force_terminal=True, width=120))
    with table.running("learning", 2, 0):
        table.show(line(1, **{"sample/reward": None, "answers/count": 0}))
        cells = drawn(table)[1].split()
    assert cells[1] == "-" and cells[4] == "-"


def test_elsewhere_there_are_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    table = RunTable(Console(file=out, width=40))
    now = [0.0]
    monkeypatch.setattr("suzuri.training.viewers.time.monotonic", lambda: now[0])
    with table.running("learning", 4, 0):
        table.show({"step": 0, "eval/reward": 0.1})
        table.show(line(1))
        now[0] = 6.0
        table.show(line(2))
        table.show(line(3))
        table.show(line(4, **{"eval/reward": 0.5}), always=True)
    lines = out.getvalue().splitlines()
    assert [text.split(",")[0] for text in lines] == [
        "learning 2/4 reward 0.250", "learning 4/4 reward 0.250",
    ]  # fmt: skip
    assert "kl max 0" in lines[0] and "held out" not in lines[0]
    assert lines[1].endswith("held out 0.500")
