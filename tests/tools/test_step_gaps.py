"""What scripts/reproduce/step_gaps.py makes of a trace."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from suzuri.tools.bench.shapes import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "reproduce"))
    return importlib.import_module("step_gaps")


def test_intervals_that_touch_or_overlap_are_one(script: ModuleType) -> None:
    assert script.busy([(5, 7), (0, 2), (2, 3), (1, 2.5), (6, 6.5)]) == [(0, 3), (5, 7)]


def test_gaps_are_what_lies_between_the_first_and_the_last_kernel(script: ModuleType) -> None:
    found = script.gaps([(0, 60), (61, 100), (150, 200)], 2)
    assert found["busy_share"] == pytest.approx(1 - 51 / 200)
    assert found["idle_us_per_step"] == pytest.approx(25.5)
    assert found["longest_gap_us"] == 50
    assert found["gaps_over_20_us_per_step"] == 0.5


def test_one_kernel_has_no_gaps(script: ModuleType) -> None:
    assert script.gaps([(3, 4)], 1)["busy_share"] == 1


def test_the_trace_is_drawn(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script.draw([("a", [(0, 60), (61, 100), (150, 200)], 0.05)], tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def test_the_longest_gaps_name_their_neighbours(script: ModuleType) -> None:
    events = [(0.0, 10.0, "a"), (2.0, 4.0, "b"), (11.0, 12.0, "c"), (20.0, 21.0, "d")]
    assert script.longest(events) == [
        {"us": 8.0, "after": "c", "before": "d"},
        {"us": 1.0, "after": "a", "before": "c"},
    ]
