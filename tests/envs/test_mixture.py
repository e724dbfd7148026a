"""The stream of tasks: places are independent, resumable, and of the kinds and difficulty asked."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from suzuri.envs.generators.kinds import KINDS
from suzuri.envs.mixture import NANO_WEIGHTS, TEXT_WEIGHTS, Mixture
from suzuri.envs.task import Task


def shown(task: Task) -> tuple[Any, ...]:
    return (task.kind, task.messages, task.target, task.tools, task.effort, task.difficulty)


def test_a_place_needs_none_before_it():
    stream = [shown(task) for task in islice(Mixture(seed=5).tasks(), 40)]
    fresh = Mixture(seed=5)
    assert [shown(fresh.task(i)) for i in reversed(range(40))] == stream[::-1]
    assert [shown(task) for task in islice(fresh.tasks(25), 15)] == stream[25:]


def test_seeds_and_splits_are_different_streams():
    streams = [Mixture(seed=1), Mixture(seed=2), Mixture(seed=1, split="held_out")]
    shown_ones = [[str(shown(m.task(i))) for i in range(30)] for m in streams]
    assert len({task for stream in shown_ones for task in stream}) == 90
    assert {Mixture(split="held_out").task(i).split for i in range(60)} == {"held_out"}
    assert {Mixture().task(i).split for i in range(60)} == {"train"}


def test_kinds_come_as_often_as_they_weigh():
    counts = Counter(Mixture(weights=TEXT_WEIGHTS).task(i).kind for i in range(3000))
    total = sum(TEXT_WEIGHTS.values())
    for kind, weight in TEXT_WEIGHTS.items():
        assert counts[kind] / 3000 == pytest.approx(weight / total, abs=0.025)
    assert set(NANO_WEIGHTS) == set(KINDS)
    assert set(NANO_WEIGHTS) - set(TEXT_WEIGHTS) == {"pictures", "sounds"}


def test_a_variant_can_be_asked_for():
    mixture = Mixture(weights={"arithmetic/add2": 1.0, "stories": 0.0}, end=(0.0, 0.0))
    tasks = [mixture.task(i) for i in range(30)]
    assert {task.variant for task in tasks} == {"add2"}
    assert {task.difficulty for task in tasks} == {0.1}


def test_difficulty_moves_and_then_stays():
    mixture = Mixture(weights={"arithmetic": 1.0}, start=(0.0, 0.2), end=(0.4, 1.0), ramp=100)
    assert mixture.difficulties(0) == (0.0, 0.2)
    assert mixture.difficulties(50) == pytest.approx((0.2, 0.6))
    assert mixture.difficulties(100) == mixture.difficulties(10**9) == (0.4, 1.0)
    assert {mixture.task(i).variant for i in range(5)} <= {"add1", "add2", "subtract1", "multiply1"}
    late = [mixture.task(i).difficulty for i in range(100, 300)]
    assert 0.4 <= min(late) < 0.45 and 0.95 < max(late) <= 1.0


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"weights": {}}, "weights: at least one"),
        ({"weights": {"stories": 0.0}}, "weights: at least one"),
        ({"weights": {"story": 1.0}}, "no kind 'story'; there are arithmetic"),
        ({"weights": {"stories/who": 1.0}}, "stories has no 'who'; it has who_has"),
        ({"weights": {"stories": -1.0, "json": 1.0}}, r"weights\['stories'\] = -1.0"),
        ({"weights": {"stories": float("nan"), "json": 1.0}}, r"weights\['stories'\] = nan"),
        ({"split": "test"}, "split = 'test'"),
        ({"start": (0.5, 0.2)}, r"start = \(0.5, 0.2\)"),
        ({"end": (0.0, 1.5)}, r"end = \(0.0, 1.5\)"),
        ({"ramp": -1}, "ramp = -1"),
    ],
)
def test_impossible_mixtures_are_refused(fields: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        Mixture(**fields)


def test_places_start_at_nought():
    with pytest.raises(ValueError, match="position = -1"):
        Mixture().task(-1)
