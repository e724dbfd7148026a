"""`suzuri bench plot`: the points of a result file, and a picture of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from suzuri.tools.bench.config import PlotConfig
from suzuri.tools.bench.plot import Point, frontier, points_of, run_plot


def cell(kind: str, batch: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        **{"model": "M", "cell": f"{kind}:{batch}x1024", "kind": kind, "batch": batch},
        **{"length": 1024, "skewed": False, "ms": ms, "recorded": []},
        **more,
    }


def document() -> dict[str, Any]:
    recorded = [{"system": "vllm-0", "ms": 4.0}]
    return {
        "what": "suzuri bench serving",
        "commit": "abc",
        "hardware": {"gpu": "a card", "num_gpus": 2},
        "cells": [
            cell("decode", 1, 2.0, recorded=recorded),
            cell("decode", 64, 8.0, recorded=recorded),
            cell("decode", 8, 10.0),
            cell("prefill", 1, 9.0),
            cell("trace", 0, 20.0, tokens_per_s=900.0, tokens_per_s_per_user=50.0),
        ],
        "peers": {"vllm": {"M": {"version": "9", "cells": {"decode:64x1024": 16.0}}}},
    }


def test_points_are_rates_per_gpu_and_per_user() -> None:
    points = points_of(document())
    found = {(p.system, p.batch): (p.per_user, p.per_gpu) for p in points}
    assert found == {
        ("suzuri", 1): (500.0, 250.0),
        ("suzuri", 64): (125.0, 4000.0),
        ("suzuri", 8): (100.0, 400.0),
        ("vllm-0 (recorded)", 1): (250.0, 125.0),
        ("vllm-0 (recorded)", 64): (250.0, 8000.0),
        ("vllm 9", 64): (62.5, 2000.0),
        ("suzuri", 0): (50.0, 450.0),
    }
    assert {p.series for p in points if p.batch} == {"M, 1,024 tokens"}


def test_the_frontier_leaves_out_what_is_beaten_in_both_rates() -> None:
    points = points_of(document())
    ours = [p for p in points if p.system == "suzuri" and p.batch]
    assert [p.batch for p in frontier(ours)] == [1, 64]
    same = Point(series="", system="", batch=1, ms=1.0, per_user=5.0, per_gpu=5.0)
    assert frontier([same, same]) == [same]


def test_a_picture_is_drawn_from_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in files:
        path.write_text(json.dumps(document()))
    out = tmp_path / "new" / "plot.png"
    assert run_plot(PlotConfig(files=tuple(map(str, files)), out=str(out))) == 0
    content = out.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 500 and len(content) > 20_000
    assert capsys.readouterr().out.strip() == f"14 points drawn into {out}"


def test_files_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    wrong = {"a.json": "{", "b.json": "[]", "c.json": '{"what": "suzuri bench kernels"}'}
    for name, text in wrong.items():
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match=name):
            run_plot(PlotConfig(files=(str(path),)))
    empty = document() | {"cells": [cell("prefill", 1, 9.0)]}
    (tmp_path / "d.json").write_text(json.dumps(empty))
    with pytest.raises(ValueError, match="no decode cell and no trace"):
        run_plot(PlotConfig(files=(str(tmp_path / "d.json"),)))
    with pytest.raises(OSError, match=r"nothing\.json"):
        run_plot(PlotConfig(files=(str(tmp_path / "nothing.json"),)))


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document()))
    with pytest.raises(ValueError, match=r"pip install 'suzuri\[plot\]'"):
        run_plot(PlotConfig(files=(str(path),), out=str(tmp_path / "a.png")))
    assert not (tmp_path / "a.png").exists()
