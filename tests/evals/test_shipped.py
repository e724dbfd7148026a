"""The weights of this package do what their card says, on held-out tasks."""

import pytest
from rich.console import Console

from suzuri import LLM
from suzuri.evals.config import EvalConfig
from suzuri.evals.run import evaluate, load_drafter

LEAST = {
    "arithmetic/add2": 0.9,
    "tools/call": 0.95,
    "pictures/colour": 0.95,
    "pictures/shape": 0.85,
    "sounds/pitch": 0.95,
}
"""What 20 tasks must reach: the promise of the card less twice what so few can be off."""


@pytest.fixture(scope="module")
def nano() -> LLM:
    return LLM("nano", dtype="bfloat16", max_running=16)


def test_scores_of_the_shipped_weights(nano: LLM) -> None:
    report = evaluate(nano, tuple(LEAST), EvalConfig(count=20), Console(quiet=True))
    found = {line.name: line.score for line in report.lines}
    assert {name: score for name, score in found.items() if score < LEAST[name]} == {}
    assert all(line.truncated == 0 for line in report.lines)


def test_draft_depths_of_the_shipped_weights_guess(nano: LLM) -> None:
    config = EvalConfig(model="nano", count=6, drafts=True)
    names = ("tools/call", "json/person")
    report = evaluate(nano, names, config, Console(quiet=True), load_drafter(config))
    assert report.accepted_length is not None and report.accepted_length > 1.5
