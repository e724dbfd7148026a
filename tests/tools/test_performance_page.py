"""scripts/reproduce/performance.py: the page says what the result files say, and no more."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suzuri.tools.bench.shapes import ROOT
from tests.tools.reproduce import load_script

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("performance")


def test_the_page_has_every_cell_of_the_files(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert script.main(["--page", str(page)]) == 0
    text = page.read_text()
    for name, document in script.newest(script.read(RESULTS, "serving-*.json")).items():
        assert f"`{name}`" in text
        for row in document["cells"]:
            if row["kind"] in ("decode", "prefill"):
                (line,) = (x for x in text.splitlines() if x.startswith(_first(script, row)))
                assert f"| {script.number(row['ms'])} |" in line
    assert text.count("\n| decode 1 x 1024 |") == 1
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def _first(script: ModuleType, row: dict[str, Any]) -> str:
    return f"| {script.spoken(row['cell'])} |"


def test_parts_without_a_file_are_left_out_and_others_come(
    script: ModuleType, tmp_path: Path
) -> None:
    serving = json.loads((RESULTS / "serving-L6E64.json").read_text())
    times = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    agents = {"model": "L6E64", "cell": "agents:16", "kind": "agents", "batch": 16, "requests": 48}
    agents |= {"median_prompt": 65536.0, "hit_rate": 0.999, "hit_of_prompt": 0.9, "skewed": False}
    agents |= {"tokens_per_s": 512.0, "first_token_ms": times, "between_tokens_ms": times}
    rate = {"rate": 4.0, "ttft_ms": times, "itl_ms": times, "goodput": 0.75}
    batch = {"step_ms": 10.0, "seconds": 2.0}
    http = {"config": {"batch": 64, "input": 1024, "output": 128}, "http": batch, "rates": [rate]}
    http |= {"engine": batch, "overhead": {"step_ms": 0.0, "seconds": 0.0}}
    (tmp_path / "serving-L6E64.json").write_text(json.dumps(serving))
    (tmp_path / "agents-L6E64.json").write_text(json.dumps({**serving, "cells": [agents]}))
    (tmp_path / "http-serving.json").write_text(json.dumps(http))
    page = tmp_path / "page.md"
    assert script.main(["--results", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text()
    assert "16 agents, 65,536 tokens in the median, 90 % cached (99.9 % of what is shared)" in text
    assert "| streams | 4 | 1.00 | 3.00 | 1.00 | 3.00 | 75 % |" in text
    assert "10.00 ms a step over HTTP, 10.00 in the engine alone (+0.0 %)" in text
    assert "launches" not in text
    assert "exactness costs" not in text
    empty = tmp_path / "empty"
    empty.mkdir()
    assert script.main(["--results", str(empty), "--page", str(page)]) == 1


def test_a_cell_that_was_measured_again_counts_once(script: ModuleType) -> None:
    def document(date: str, **cells: float) -> dict[str, Any]:
        rows = [{"model": "A", "cell": name, "ms": ms} for name, ms in cells.items()]
        return {"date": date, "cells": rows}

    found = {"a": document("2026-01-01", one=3.0, two=4.0), "b": document("2026-01-02", one=2.0)}
    left = script.newest(found)
    assert [row["ms"] for row in left["a"]["cells"]] == [4.0]
    assert [row["ms"] for row in left["b"]["cells"]] == [2.0]
