"""scripts/reproduce/long_context.py on a tiny shape: equal bits, resumed, and what it sees."""

import argparse
import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suzuri.engine.runner import Runner
from tests.tools.reproduce import load_script

TOKENS, ROWS, DECODE = 300, 12, 4


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("long_context")


def options(script: ModuleType, state: Path, *more: str) -> argparse.Namespace:
    words = ["--model", "tiny", "--device", "cpu", "--tokens", str(TOKENS), "--chunks", "64", "90"]
    words += ["--rows", str(ROWS), "--decode", str(DECODE), "--neighbours", "3"]
    found: argparse.Namespace = script.parse([*words, "--state", str(state), *more])
    return found


def test_four_ways_have_the_same_bits_and_are_kept(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"
    # No time at all: the first pass runs, whose length nobody knows, and no other.
    assert script.run(options(script, state, "--seconds", "0")) == script.UNFINISHED
    assert "stopped before" in capsys.readouterr().out
    assert script.run(options(script, state)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"OK: 4 passes of {TOKENS} tokens, {ROWS + DECODE - 1} rows, all equal bits"
    passes = json.loads(state.read_text())["passes"]
    assert [kept["steps"] for kept in passes.values()][:3] == [5 + 3, 4 + 3, 5 + 3]
    wanted = {str(p) for p in range(TOKENS - DECODE - ROWS, TOKENS - 1)}
    for kept in passes.values():
        assert set(kept["rows"]) == wanted
        assert len(set(kept["rows"].values())) == len(wanted)
        assert len(kept["tokens"]) == DECODE
    before = state.read_text()
    assert script.run(options(script, state)) == 0
    assert state.read_text() == before
    with pytest.raises(ValueError, match=r"of another run \(seed differ\)"):
        script.run(options(script, state, "--seed", "1"))
    tampered = json.loads(before)
    name = list(passes)[3]
    tampered["passes"][name]["rows"][str(TOKENS - 2)] = "0"
    tampered["passes"][name]["tokens"][0] += 1
    tampered["passes"][name]["peak_bytes"] = tampered["passes"][name]["planned_bytes"] + 1
    state.write_text(json.dumps(tampered))
    assert script.run(options(script, state)) == 1
    shown = capsys.readouterr().out
    assert f"FAILED {name}: row {TOKENS - 2} and 0 more are not those of chunks of 64" in shown
    assert f"FAILED {name}: decoded" in shown and "is more than the planned" in shown


def test_a_build_whose_bits_depend_on_chunks_is_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a conv ring is lost between the chunks of the second size only."""
    execute = Runner.execute

    def broken(self: Runner, plan: Any) -> Any:
        if self.config.token_budget == 90:
            self.cache.layers[-1].mlp_conv_LRC.mul_(0.5)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", broken)
    assert script.run(options(script, tmp_path / "state.json")) == 1


def test_layers_are_cut_from_the_front(script: ModuleType) -> None:
    full, cut = script.shape_of("tiny", None).text, script.shape_of("tiny", 3).text
    assert cut.num_hidden_layers == 3
    kinds = [full.is_local(i) for i in range(full.num_hidden_layers)]
    assert [cut.is_local(i) for i in range(3)] == kinds[-3:]
    dense = [full.is_dense(i) for i in range(full.num_hidden_layers)]
    assert [cut.is_dense(i) for i in range(3)] == dense[-3:]
    assert dataclasses.replace(cut, num_hidden_layers=6) != full
    with pytest.raises(ValueError, match="--layers 7: the model has 6"):
        script.shape_of("tiny", 7)
    with pytest.raises(ValueError, match="--tokens 5000"):
        script.run(options(script, Path("unused.json"), "--tokens", "5000"))
