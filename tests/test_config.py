"""What a config calls what a recipe made: enough to tell another run from this one."""

import dataclasses
import functools
from typing import Any

import pytest

from suzuri.config import name_of


def graded(text: str) -> float:
    return float(bool(text))


def other(text: str) -> float:
    return 1.0 - graded(text)


@dataclasses.dataclass
class Made:
    reward: Any
    weights: Any = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (graded, "graded"),
        (Made, "Made"),
        (Made(graded, {"a": 1}), "Made(reward=graded, weights={'a': 1})"),
        (functools.partial(Made, Made(1)), "Made(Made(reward=1, weights=None))"),
        (functools.partial(Made, reward=graded), "Made(reward=graded)"),
        (functools.partial(functools.partial(Made, 1), weights=2), "Made(1, weights=2)"),
        (object(), "object"),
    ],
)
def test_names_are_equal_in_every_process_and_say_what_was_given(value: Any, expected: str) -> None:
    assert name_of(value) == expected


def test_another_reward_is_another_name() -> None:
    """A run whose reward was changed must not go on as if it had not been."""
    names = {name_of(functools.partial(Made, reward=reward)) for reward in (graded, other, None)}
    assert len(names) == 3
