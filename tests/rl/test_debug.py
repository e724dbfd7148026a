"""One half of a run without the other: the same numbers come of it."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suzuri.envs.rollout import Limits
from suzuri.model.config import preset
from suzuri.rl.config import DebugConfig
from suzuri.rl.rollouts import load_rollouts, path_of
from suzuri.rl.run import run_rl
from suzuri.training.trainer import LocalTrainer
from tests.rl.test_run import metrics, small

DRAWN = ("sample/", "answers/", "groups/", "lag/")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved what it drew."""
    folder = tmp_path_factory.mktemp("debug") / "saved"
    assert run_rl(small(folder, save_rollouts=1)) == 0
    return folder


def without_evaluation(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines]
    return [line for line in found if line["step"]]


def test_every_batch_is_a_file(saved: Path) -> None:
    names = sorted(file.name for file in (saved / "rollouts").iterdir())
    assert names == [f"step-{step:06d}.safetensors" for step in range(1, 7)]
    batch = load_rollouts(saved / "rollouts", 4)
    assert (batch.step, batch.version, len(batch.groups)) == (4, 3, 2)
    rewards = [one.reward for group in batch.groups for one in group.trajectories]
    reward = metrics(saved)[4]["sample/reward"]
    assert sum(one or 0.0 for one in rewards) / len(rewards) == reward


def test_every_other_batch(tmp_path: Path) -> None:
    assert run_rl(small(tmp_path / "run", save_rollouts=2, eval_problems=None, steps=4)) == 0
    names = sorted(file.name for file in (tmp_path / "run" / "rollouts").iterdir())
    assert names == ["step-000002.safetensors", "step-000004.safetensors"]


def test_training_alone_brings_the_same_numbers(saved: Path, tmp_path: Path) -> None:
    debug = DebugConfig(only="training", rollouts=str(saved))
    assert run_rl(small(tmp_path / "run", debug=debug, save_rollouts=1)) == 0
    assert metrics(tmp_path / "run") == without_evaluation(metrics(saved))
    hashes = [(run / "weights.json").read_text() for run in (saved, tmp_path / "run")]
    assert hashes[0] == hashes[1]


def test_training_alone_needs_all_batches(saved: Path, tmp_path: Path) -> None:
    debug = DebugConfig(only="training", rollouts=str(saved))
    with pytest.raises(ValueError, match=r"step-000007.*is not there"):
        run_rl(small(tmp_path / "run", debug=debug, steps=9))


def test_drawing_alone_learns_nothing(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_rl(small(folder, debug=DebugConfig(only="rollouts"), steps=3)) == 0
    lines, whole = metrics(folder), metrics(saved)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    drawn = {k: v for k, v in whole[1].items() if k.startswith(DRAWN)}
    assert {k: v for k, v in lines[1].items() if k.startswith(DRAWN)} == drawn
    assert not any(k.startswith(("train/", "optim/", "kl/")) for line in lines for k in line)
    assert not (folder / "weights").exists() and not list((folder / "states").glob("*"))
    versions = {load_rollouts(folder / "rollouts", step).version for step in (1, 2, 3)}
    assert versions == {0}, "the weights are those of the start"
    # And what it drew can be learned from.
    debug = DebugConfig(only="training", rollouts=str(folder))
    assert run_rl(small(tmp_path / "learned", debug=debug, steps=1)) == 0
    assert metrics(tmp_path / "learned") == without_evaluation(whole)[:1]


@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_step_is_learned_once_more(
    saved: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4 from the start: states before it were removed. Step 5 from the state of step 4."""
    before = {file: file.stat().st_mtime_ns for file in saved.rglob("*")}
    assert run_rl(small(saved, save_rollouts=1, debug=DebugConfig(replay=step))) == 0
    state = 4 if step == 5 else 0
    expected = f"step {step}: all numbers are the same (from the state of step {state})"
    assert expected in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in saved.rglob("*")} == before


def test_a_step_that_comes_out_otherwise_says_where(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalTrainer.optim_step

    def off(self: LocalTrainer, *args: Any) -> Any:
        found = real(self, *args)
        return found | {"grad_norm": found["grad_norm"] * (1 + 2**-40)}

    monkeypatch.setattr(LocalTrainer, "optim_step", off)
    assert run_rl(small(saved, save_rollouts=1, debug=DebugConfig(replay=2))) == 1
    out = capsys.readouterr().out
    assert "step 2: optim/grad_norm was" in out and out.count("\n") == 1


def test_a_step_of_older_weights_is_learned_once_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fields: dict[str, Any] = {"lag": 1, "save_rollouts": 1, "steps": 4, "eval_problems": None}
    assert run_rl(small(folder, **fields)) == 0
    assert all(line["lag/tokens:max"] in (0, 1) for line in metrics(folder))
    fields["save_rollouts"] = 0  # what is kept changes no number
    assert run_rl(small(folder, **fields, debug=DebugConfig(replay=3))) == 0


def test_experts_are_saved_and_given_back(saved: Path, tmp_path: Path) -> None:
    """Without a lag the trainer's own choice is the same, so every number is."""
    folder = tmp_path / "run"
    limits = Limits(max_tokens=6, max_context=64, routing=True)
    fields: dict[str, Any] = {"save_rollouts": 1, "steps": 3, "limits": limits}
    assert run_rl(small(folder, **fields)) == 0
    assert without_evaluation(metrics(folder)) == without_evaluation(metrics(saved))[:3]
    text = preset("tiny").text
    for group in load_rollouts(folder / "rollouts", 2).groups:
        for one in group.trajectories:
            (turn,) = one.turns
            assert turn.answer.routing is not None and turn.answer.routing.dtype == np.uint8
            count = len(turn.prompt.tokens) + len(turn.answer.tokens) - 1
            assert turn.answer.routing.shape[::2] == (count, text.num_experts_per_tok)
    assert run_rl(small(folder, **fields, debug=DebugConfig(replay=2))) == 0


def test_what_cannot_be_learned_once_more_is_refused(saved: Path, tmp_path: Path) -> None:
    for step, said in ((7, "has no such step"), (99, "the run has 7 steps")):
        with pytest.raises(ValueError, match=said):
            run_rl(small(saved, save_rollouts=1, steps=7, debug=DebugConfig(replay=step)))
    with pytest.raises(ValueError, match=r"metrics.jsonl is not there"):
        run_rl(small(tmp_path / "none", debug=DebugConfig(replay=1)))
    with pytest.raises(ValueError, match=r"differs in config.group_size|differs in .*group_size"):
        run_rl(small(saved, save_rollouts=1, group_size=4, debug=DebugConfig(replay=1)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"only": "training"}, "needs debug.rollouts"),
        ({"only": "nothing"}, "must be all, rollouts or training"),
        ({"rollouts": "x"}, "is for debug.only = training"),
        ({"replay": 0}, "debug.replay = 0"),
        ({"replay": 1, "only": "rollouts"}, "leave one out"),
    ],
)
def test_switches_name_what_is_wrong(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DebugConfig(**fields)


def test_what_is_under_way_at_ctrl_c_is_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lag: batches that were begun ahead are given up. Whoever goes on draws the same
    problems with the same seeds, by the weights that are there then."""
    folder, real = tmp_path / "run", LocalTrainer.optim_step

    def interrupted(self: LocalTrainer, *args: Any) -> Any:
        if self.num_steps == 1:
            signal.raise_signal(signal.SIGINT)
        return real(self, *args)

    fields: dict[str, Any] = {
        "lag": 2,
        "save_rollouts": 1,
        "eval_problems": None,
        "limits": Limits(max_tokens=20, max_context=64),
    }
    monkeypatch.setattr("suzuri.rl.loop.asyncio.to_thread", direct)
    monkeypatch.setattr(LocalTrainer, "optim_step", interrupted)
    assert run_rl(small(folder, **fields)) == 130
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert not path_of(folder / "rollouts", 3).exists()
    monkeypatch.undo()
    assert run_rl(small(folder, **fields)) == 0
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["lag/tokens:max"] == 0 and lines[2]["kl/sampler_trainer_max"] == 0.0
    third = load_rollouts(folder / "rollouts", 3)
    assert {
        v for g in third.groups for t in g.trajectories for v in t.turns[0].answer.versions
    } == {2}
    assert [group.place for group in third.groups] == [4, 5]
    text = (folder / "config.json").read_text()
    assert json.loads(text)["config"]["debug"]["only"] == "all"


async def direct(call: Any, *args: Any) -> Any:
    """On this thread, where signals arrive."""
    return call(*args)
