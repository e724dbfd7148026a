"""What scripts/reproduce/step_gaps.py makes of a trace."""

from pathlib import Path

import pytest

from scripts.reproduce.step_gaps import busy, draw, gaps


def test_intervals_that_touch_or_overlap_are_one():
    assert busy([(5, 7), (0, 2), (2, 3), (1, 2.5), (6, 6.5)]) == [(0, 3), (5, 7)]


def test_gaps_are_what_lies_between_the_first_and_the_last_kernel():
    found = gaps([(0, 60), (61, 100), (150, 200)], 2)
    assert found["busy_share"] == pytest.approx(1 - 51 / 200)
    assert found["idle_us_per_step"] == pytest.approx(25.5)
    assert found["longest_gap_us"] == 50
    assert found["gaps_over_20_us_per_step"] == 0.5


def test_one_kernel_has_no_gaps():
    assert gaps([(3, 4)], 1)["busy_share"] == 1


def test_the_trace_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw([("a", [(0, 60), (61, 100), (150, 200)], 0.05)], tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 1000
