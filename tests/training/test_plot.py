"""Curves of metrics.jsonl: what is read, how it is put together, and a picture that can be seen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from suzuri.config import parse
from suzuri.tools.plot import curves_of, panels, run_plot
from suzuri.tools.plot_config import PlotConfig

LINES: list[dict[str, Any]] = [
    {"step": 1, "train/loss": 3.0, "optim/learning_rate": 0.1, "time/seconds": 1, "note": "x"},
    {"step": 2, "train/loss": 2.0, "optim/learning_rate": 0.2, "time/seconds": 1},
    {"step": 2, "eval/loss": 2.5, "eval/flag": True},
    {"step": 3, "train/loss": float("nan"), "optim/learning_rate": 0.1, "time/seconds": 1},
]


def run_in(folder: Path, lines: list[dict[str, Any]] = LINES, tail: str = "") -> str:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return str(folder)


def test_curves_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = run_in(tmp_path / "a", tail='{"step": 4, "train/lo')
    found = {curve.key: (curve.steps, curve.values) for curve in curves_of(path, "a")}
    assert found == {
        "train/loss": ((1, 2), (3.0, 2.0)),
        "optim/learning_rate": ((1, 2, 3), (0.1, 0.2, 0.1)),
        "time/seconds": ((1, 2, 3), (1.0, 1.0, 1.0)),
        "eval/loss": ((2,), (2.5,)),
    }
    assert curves_of(f"{path}/metrics.jsonl", "a") == curves_of(path, "a")
    grouped = panels(curves_of(path, "a"))
    assert list(grouped) == ["loss", "learning_rate", "seconds"]
    assert [curve.key for curve in grouped["loss"]] == ["train/loss", "eval/loss"]


def test_runs_are_drawn_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_in(tmp_path / name) for name in ("a", "b")]
    out = tmp_path / "made" / "curves.png"
    config = PlotConfig(runs=tuple(runs), out=str(out)).resolve()
    assert run_plot(config) == 0
    assert capsys.readouterr().out == f"6 curves of 2 runs drawn into {out}\n"
    with Image.open(out) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in ((31, 119, 180), (255, 127, 14)):  # the first two that matplotlib takes
        assert (pixels == colour).all(1).sum() > 20
    one = PlotConfig(runs=(runs[0],), out=str(out), keys=("optim", "time/seconds")).resolve()
    assert run_plot(one) == 0
    assert capsys.readouterr().out.startswith("2 curves of 1 run drawn")


def test_what_cannot_be_drawn_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    path = run_in(tmp_path / "a")
    with pytest.raises(ValueError, match="there are eval/loss, optim/learning_rate, time/sec"):
        run_plot(PlotConfig(runs=(path,), keys=("los",), out=str(tmp_path / "x.png")))
    with pytest.raises(FileNotFoundError):
        run_plot(PlotConfig(runs=(str(tmp_path / "absent"),), out=str(tmp_path / "x.png")))
    broken = run_in(tmp_path / "broken", tail="[]\n" + json.dumps(LINES[0]) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:5: not a line of metrics"):
        run_plot(PlotConfig(runs=(broken,), out=str(tmp_path / "x.png")))
    with pytest.raises(ValueError, match=r"--out x\.jpg"):
        PlotConfig(runs=(path,), out="x.jpg").resolve()
    with pytest.raises(ValueError, match="at least one folder"):
        PlotConfig().resolve()

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(ValueError, match=r"suzuri\[plot\]"):
        run_plot(PlotConfig(runs=(path,), out=str(tmp_path / "x.png")))


def test_the_command_line() -> None:
    config = parse(PlotConfig, prog="suzuri plot", args=["a", "b", "--out", "c.png", "--keys", "d"])
    assert (config.runs, config.out, config.keys) == (("a", "b"), "c.png", ("d",))
