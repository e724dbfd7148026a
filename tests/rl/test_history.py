"""Whole runs against what such runs were, and the guard itself against broken ones."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suzuri.rl.history import (
    WIDTHS,
    Width,
    bands_of,
    check,
    main,
    read_bands,
    write_bands,
)
from suzuri.rl.run import run_rl
from suzuri.training.run_dir import read_metrics
from tests.rl.test_run import small

RECORDED = Path(__file__).parent / "data" / "history-tiny.json"
"""Bands around `small` as it is: `python -m suzuri.rl.history RUN FILE --record`."""

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "run"
    assert run_rl(small(folder)) == 0
    return folder


def test_a_run_goes_as_it_went(folder: Path) -> None:
    bands = read_bands(RECORDED)
    assert sorted(bands) == [0, 1, 2, 3, 4, 5, 6]
    assert set(bands[6]) == set(WIDTHS) and set(bands[0]) == {"eval/reward"}
    assert check(read_metrics(folder), bands) == []


def shifted(lines: Lines, name: str, by: float) -> None:
    lines[4][name] += by


BROKEN: dict[str, tuple[Callable[[Lines], Any], str]] = {
    "above": (lambda x: shifted(x, "sample/reward", 0.5), "step 4: sample/reward ="),
    "below": (lambda x: shifted(x, "sample/reward", -0.5), "step 4: sample/reward ="),
    "an ulp of divergence": (
        lambda x: shifted(x, "kl/sampler_trainer_max", 2**-30),
        "step 4: kl/sampler_trainer_max =",
    ),
    "NaN": (lambda x: shifted(x, "train/loss", float("nan")), "step 4: train/loss is nan"),
    "no value": (lambda x: x[4].update({"train/loss": None}), "step 4: train/loss is None"),
    "a switch": (lambda x: x[4].update({"train/loss": True}), "step 4: train/loss is True"),
    "a number left out": (lambda x: x[2].pop("optim/grad_norm"), "optim/grad_norm is missing"),
    "an evaluation left out": (lambda x: x[3].pop("eval/reward"), "step 3: eval/reward is missing"),
    "a row left out": (lambda x: x.pop(2), "steps 2 of 6 are missing"),
    "too short": (lambda x: x.pop(), "steps 6 of 6 are missing"),
    "empty": (lambda x: x.clear(), "steps 0, 1, 2, 3, 4 of 6 are missing"),
    "twice": (lambda x: x.insert(3, x[3]), "twice or out of order"),
    "out of order": (lambda x: x.reverse(), "twice or out of order"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_run_that_went_otherwise_is_noticed(folder: Path, case: str) -> None:
    change, said = BROKEN[case]
    lines: Lines = copy.deepcopy([dict(line) for line in read_metrics(folder)])
    change(lines)
    assert said in "\n".join(check(lines, read_bands(RECORDED)))


def test_more_steps_and_more_numbers_are_no_fault() -> None:
    bands = bands_of([[{"step": 1, "a": 1.0}]], {"a": Width()})
    assert check([{"step": 1, "a": 1.0, "b": float("nan")}, {"step": 2}], bands) == []


def test_bands_are_around_all_runs() -> None:
    runs = [[{"step": 1, "a": 1.0}], [{"step": 1, "a": -2.0}]]
    bands = bands_of(runs, {"a": Width(absolute=0.5, relative=0.1)})
    assert bands == {1: {"a": (pytest.approx(-2.7), pytest.approx(1.6))}}
    for value, is_fine in ((-2.7, True), (1.6, True), (1.61, False), (-2.71, False)):
        assert (check([{"step": 1, "a": value}], bands) == []) is is_fine


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="a is nan, no number"):
        bands_of([[{"step": 1, "a": float("nan")}]], {"a": Width()})
    with pytest.raises(ValueError, match="none of a is in the lines"):
        bands_of([[{"step": 1}]], {"a": Width()})
    with pytest.raises(ValueError, match="other steps"):
        bands_of([[{"step": 1, "a": 1}], [{"step": 2, "a": 1}]], {"a": Width()})
    with pytest.raises(ValueError, match="relative = -1"):
        Width(relative=-1)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bands = str(tmp_path / "bands.json")
    assert main([str(folder), bands, "--record"]) == 0
    assert main([str(folder), bands]) == 0
    assert capsys.readouterr().out == ""
    lines: Lines = [dict(line) for line in read_metrics(folder)]
    lines[1]["sample/reward"] = 9.0
    other = tmp_path / "metrics.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path), bands]) == 1
    assert "step 1: sample/reward = 9" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), bands]) == 2
    Path(bands).write_text("{}")
    assert main([str(folder), bands]) == 2
    assert "holds no bands" in capsys.readouterr().err
    other.write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: not a line"):
        read_metrics(other)


def test_bands_come_back_from_their_file(tmp_path: Path) -> None:
    bands = bands_of(
        [[{"step": 3, "a": 1 / 3}, {"step": 4, "a": 0.0}]], {"a": Width(absolute=1e-9)}
    )
    write_bands(tmp_path / "x", bands)
    assert read_bands(tmp_path / "x") == bands
