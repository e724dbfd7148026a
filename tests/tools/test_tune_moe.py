"""scripts/reproduce/tune_moe.py: what a tuning of some sizes does to the table."""

import json

import pytest

pytest.importorskip("triton")
from suzuri.kernels.grouped_gemm import tiles
from tests.tools.reproduce import load_script


def test_found_sizes_take_their_places_and_the_rest_stays() -> None:
    script = load_script("tune_moe")
    before = json.loads(tiles.TABLE.read_text("utf-8"))["entries"]
    changed = {**before[3], "us": 1.0}
    new = {**before[3], "mean": 1e9}
    entries = script.merged(before, [changed, new])
    assert entries == [*before[:3], changed, *before[4:], new]
    assert script.merged(before, []) == before


def test_every_field_of_a_schedule_has_a_letter() -> None:
    script = load_script("tune_moe")
    (entry, *_) = tiles.table()
    row = {"schedule": entry.schedule.as_json(), "us": 2.0, "rule_us": 3.0, "refused": {}}
    for letter, field in script.MARKS.items():
        on = row["schedule"] | dict.fromkeys(script.MARKS.values(), False) | {field: True}
        said = script.line("x", row | {"schedule": on, "flops": 4e9, "bytes": 1e6})
        assert f"{letter} g{entry.schedule.group}" in said
