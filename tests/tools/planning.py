"""Command lines of `suzuri plan`, run in this process, for its tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from suzuri.config import parse
from suzuri.model.config import preset
from suzuri.tools.plan.card import find_card
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.run import run_plan

ROOT = Path(__file__).parents[2]
L6E64 = ROOT / "benchmarks" / "shapes" / "L6E64" / "config.json"
NVFP4 = ("--experts", "nvfp4")
BY_NUMBERS = ("--memory", "96", "--bandwidth", "1.8", "--tflops", "400")
CARD = find_card(None, memory=100, bandwidth=2, tflops=500)
CONFIG = preset("inkling-small")
Plan = Callable[..., tuple[int, list[str], str]]


def planner(capsys: pytest.CaptureFixture[str]) -> Plan:
    """A function from words to (exit code, lines of stdout, stderr or the refusal)."""

    def run(*words: str) -> tuple[int, list[str], str]:
        try:
            code = run_plan(parse(PlanConfig, prog="suzuri plan", args=words).resolve())
        except ValueError as error:
            return 2, capsys.readouterr().out.splitlines(), str(error)
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run
