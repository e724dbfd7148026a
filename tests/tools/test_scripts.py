"""Scripts that measure a GPU: what a tuning of some sizes does to the table, and what they say on a
machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from suzuri.kernels.grouped_gemm import tiles
from suzuri.tools.bench.shapes import ROOT
from tests.tools.reproduce import load_script


def test_found_sizes_take_their_places_and_the_rest_stays() -> None:
    script = load_script("tune_moe")
    before = json.loads(tiles.TABLE.read_text("utf-8"))["entries"]
    changed = {**before[3], "us": 1.0}
    new = {**before[3], "mean": 1e9}
    entries = script.merged(before, [changed, new])
    assert entries == [*before[:3], changed, *before[4:], new]
    assert script.merged(before, []) == before


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    """The table that it would make could not be read."""
    script, state = load_script("tune_moe"), tmp_path / "state.json"
    assert script.measured(state) == {}
    schedule = tiles.table()[0].schedule.as_json()
    state.write_text(json.dumps({"cells": {"one": {"schedule": schedule}}}))
    assert script.measured(state) == {"one": {"schedule": schedule}}
    del schedule["halved"]
    state.write_text(json.dumps({"cells": {"one": {"schedule": schedule}}}))
    with pytest.raises(SystemExit, match="lack 'halved'"):
        script.measured(state)


def test_every_field_of_a_schedule_has_a_letter() -> None:
    script = load_script("tune_moe")
    (entry, *_) = tiles.table()
    row = {"schedule": entry.schedule.as_json(), "us": 2.0, "rule_us": 3.0, "refused": {}}
    for letter, field in script.MARKS.items():
        on = row["schedule"] | dict.fromkeys(script.MARKS.values(), False) | {field: True}
        said = script.line("x", row | {"schedule": on, "flops": 4e9, "bytes": 1e6})
        assert f"{letter} g{entry.schedule.group}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    "words",
    [
        ["scripts/reproduce/head.py"],
        ["scripts/reproduce/split_or_rows.py"],
        ["scripts/reproduce/tune_moe.py", "state.json"],
        ["scripts/reproduce/step_profile.py", "tiny", "decode:1x16"],
        ["scripts/reproduce/step_gaps.py", "tiny", "decode:1x16"],
        ["scripts/reproduce/ablations.py", "tiny"],
        ["benchmarks/kernels/attention.py", "out.json"],
        ["benchmarks/kernels/matmul.py", "out.json"],
    ],
    ids=lambda words: words[0].rsplit("/", 1)[-1],
)
def test_without_a_gpu_a_script_says_so(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / words[0]), *words[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode not in (0, -9)
    assert "Traceback" not in done.stderr
    assert "cuda" in done.stderr or "needs a GPU" in done.stderr
    assert not [*tmp_path.iterdir()]
