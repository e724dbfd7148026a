"""What the head of a result file says: enough to do it again, nothing of the machine's folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.tools.bench import record
from suzuri.tools.bench.shapes import ROOT

RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/suzuri", "bench", "x"], "suzuri bench x"),
        (
            [f"{ROOT}/suzuri/__main__.py", "bench", "--out", "/a/b/c.json"],
            "suzuri bench --out c.json",
        ),
        (["suzuri", "bench", "--out=/a/b/c.json", "a b"], "suzuri bench --out=c.json 'a b'"),
        (
            ["suzuri", "bench", "/a/b=1/c.json", "--out=/a/b=1/d.json"],
            "suzuri bench c.json --out=d.json",
        ),
        (["scripts/reproduce/head.py", "--out", "runs/x.json"], None),
        ([f"{ROOT}/scripts/reproduce/head.py", "--out", "runs/x.json"], None),
        (["/elsewhere/mine.py", "/data/model"], "python mine.py model"),
    ],
)
def test_the_command(
    words: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert record.command(words) == (
        expected or "python scripts/reproduce/head.py --out runs/x.json"
    )


def test_folders_are_left_out_of_the_settings() -> None:
    config: dict[str, Any] = {
        "out": Path("/a/b.json"),
        "state": "/a/c.json",
        "models": ["/a/model", "benchmarks/shapes/L6E64"],
        "ratio": 0.5,
        "near": Path("runs/d.json"),
    }
    found = record.header("test", torch.device("cpu"), config)["config"]
    assert found == {
        "out": "b.json",
        "state": "c.json",
        "models": ["model", "benchmarks/shapes/L6E64"],
        "ratio": 0.5,
        "near": "runs/d.json",
    }


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_no_result_names_a_folder_of_its_machine(path: Path) -> None:
    def words(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [word for one in value.values() for word in words(one)]
        if isinstance(value, list):
            return [word for one in value for word in words(one)]
        return value.split() if isinstance(value, str) else []

    document = json.loads(path.read_text("utf-8"))
    folders = ("/root", "/tmp", "/home", "/work", "/opt", "/usr", "/mnt", "/data")
    assert not [word for word in words(document) if word.rpartition("=")[2].startswith(folders)]
