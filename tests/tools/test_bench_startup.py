"""`suzuri bench startup` on a CPU, where nothing is prepared: fresh processes and one file. What is
late is named.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from suzuri.tools.bench import startup
from suzuri.tools.bench.config import StartupConfig, parse_bench
from suzuri.tools.bench.run import run_bench

TINY = ("tiny", "--random-weights", "--device", "cpu", "--max-context", "128")


def config_of(*words: str) -> StartupConfig:
    config = parse_bench(["startup", *TINY, *words]).resolve()
    assert isinstance(config, StartupConfig)
    return config


def test_a_cold_start_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert run_bench(config_of("--cold", "--max-running", "4", "--out", str(out))) == 0
    document = json.loads(out.read_text("utf-8"))
    assert document["what"] == "suzuri bench startup"
    assert list(document["starts"]) == ["cold"]
    start = document["starts"]["cold"]
    for name in ("weights_s", "ready_s", "first_token_s", "load_s"):
        assert start[name] > 0
    assert start["load_tokens"] >= 24 * 24
    assert start["late"] == []
    assert "cold" in capsys.readouterr().out


def test_late_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(config: StartupConfig, folder: str) -> dict[str, Any]:
        times = dict.fromkeys(("weights_s", "ready_s", "first_token_s"), 1.0)
        return {**times, "parts_s": {"compiling kernels": 2.0}, "late": ["slow[num_warps=4]"]}

    monkeypatch.setattr(startup, "one_start", answer)
    assert run_bench(config_of()) == 1
    said = capsys.readouterr().out
    assert "slow[num_warps=4]" in said
    assert "warm: compiling kernels 2.00" in said


def test_what_does_not_start_is_told(tmp_path: Path) -> None:
    config = StartupConfig(model=str(tmp_path / "nothing"), device="cpu")
    with pytest.raises(ValueError, match="did not start"):
        startup.one_start(config, str(tmp_path))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--device", "tpu"), "--device"),
        (("--max-running", "0"), "--max-running"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_wrong_flags_are_named(words: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        config_of(*words)
