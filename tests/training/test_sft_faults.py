"""Runs of `suzuri sft` that something goes wrong with: what is said, and what is left to go on."""

import dataclasses
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from suzuri import cli
from suzuri.training import batches as batches_module
from suzuri.training.batches import Holdout
from suzuri.training.config import SftConfig, TrainingConfig
from suzuri.training.data import Checked
from suzuri.training.run_dir import RunDir
from suzuri.training.sft import run_sft
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Conversation, Sample
from tests.training.samples import samples, trainer

CHATS = Path(__file__).parents[2] / "recipes" / "data" / "chats.jsonl"


def config(run_dir: Path, **fields: Any) -> SftConfig:
    data = run_dir.parent / "chats.jsonl"
    data.write_text("".join(CHATS.read_text("utf-8").splitlines(keepends=True)[:9]), "utf-8")
    found = SftConfig(
        model="tiny",
        random_weights=True,
        train=(str(data),),
        run_dir=str(run_dir),
        steps=4,
        batch_size=3,
        save_every=1,
    )
    return dataclasses.replace(found, **fields).resolve()


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]


def losses_of(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").open()]


def test_a_disk_that_fills_up_stops_the_run_with_the_state_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, states = torch.save, tmp_path / "run" / "states"

    def full(*args: Any, **options: Any) -> None:
        if (states / "step-2").is_dir():
            raise OSError(28, "No space left on device")
        real(*args, **options)

    monkeypatch.setattr(torch, "save", full)
    assert run_sft(config(tmp_path / "run")) == 1
    text = capsys.readouterr().err
    assert "the state could not be written" in text
    assert "No space left on device" in text
    assert f"The last state is {states / 'step-2'}" in text
    assert sorted(one.name for one in states.iterdir()) == ["step-1", "step-2"]
    monkeypatch.undo()
    assert run_sft(config(tmp_path / "run")) == 0
    assert run_sft(config(tmp_path / "whole")) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_metrics_and_weights_that_cannot_be_written_stop_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for name, at in (("write", "step 1: "), ("publish", "step 4: the weights could not be ")):
        with monkeypatch.context() as patch:
            patch.setattr(RunDir, name, full)
            assert run_sft(config(tmp_path / "run")) == 1
        text = capsys.readouterr().err
        assert at in text
        assert "No space left on device" in text
    assert run_sft(config(tmp_path / "run")) == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert (tmp_path / "run" / "weights" / "config.json").exists()


def test_a_run_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"run_dir .*: no folder that can be written"):
            run_sft(dataclasses.replace(config(tmp_path / "a"), run_dir=str(path)))
    if os.getuid():  # nothing is read-only for root
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(ValueError, match=r"run_dir .*Permission denied"):
            run_sft(config(tmp_path / "locked" / "run"))


def test_settings_of_a_run_that_made_no_step_may_be_mended(tmp_path: Path) -> None:
    """A pattern without a match is found when the model is there, so config.json is, too."""
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="no parameter is named like"):
        run_sft(config(run, trainer=TrainingConfig(frozen=("*.atn.*",))))
    assert run_sft(config(run, trainer=TrainingConfig(frozen=("*.attn.*",)))) == 0
    document = json.loads((run / "config.json").read_text())
    assert document["config"]["trainer"]["frozen"] == ["*.attn.*"]
    with pytest.raises(ValueError, match=r"trainer\.frozen"):
        run_sft(config(run))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "inkling"}')
    with pytest.raises(ValueError, match="is not that of a run"):
        run_sft(config(model))
    assert (model / "config.json").read_text() == '{"model_type": "inkling"}'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_step_starts_anew(
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import suzuri.training.sft as module

    class Stopped(module._Run):
        def _one(self, step: int, steps: int) -> None:
            raise AssertionError("no step is made")

    real = module.asked_to_stop

    def asked(what: str) -> Any:
        manager = real(what)
        enter = manager.__enter__

        class Now:
            def __enter__(self) -> Any:
                found = enter()
                os.kill(os.getpid(), number)
                return found

            def __exit__(self, *given: Any) -> Any:
                return manager.__exit__(*given)

        return Now()

    monkeypatch.setattr(module, "_Run", Stopped)
    monkeypatch.setattr(module, "asked_to_stop", asked)
    assert run_sft(config(tmp_path / "run")) == 130
    out = capsys.readouterr().out
    assert out == "stopped after step 0 of 4; the same command again starts anew\n"
    assert not (tmp_path / "run" / "states").exists()
    monkeypatch.undo()
    assert run_sft(config(tmp_path / "run")) == 0


def test_so_many_states_stay_as_were_asked_for_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalTrainer.optim_step

    def interrupted(self: LocalTrainer, *args: Any) -> Any:
        if self.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args)

    monkeypatch.setattr(LocalTrainer, "optim_step", interrupted)
    assert run_sft(config(tmp_path / "run", keep=2)) == 130
    states = tmp_path / "run" / "states"
    assert sorted(one.name for one in states.iterdir()) == ["step-2", "step-3"]
    monkeypatch.undo()
    assert run_sft(config(tmp_path / "run", keep=1)) == 0
    assert sorted(one.name for one in states.iterdir()) == ["step-4"]


class Numbers:
    """Counts how often a conversation is asked for."""

    size = 5

    def __init__(self) -> None:
        self.asked: list[int] = []

    def conversation(self, index: int) -> Conversation:
        self.asked.append(index)
        return Conversation(text=f"{index}")


class Maker:
    """A conversation is as many random tokens as it says."""

    def samples(self, conversation: Conversation) -> list[Sample]:
        return samples((3 + int(conversation.text or 0),))


def test_what_is_evaluated_on_is_rendered_once_while_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = Checked(
        indices=np.array([0, 1, 3, 4]), lengths=np.array([3] * 4), num_bad=0, faults=()
    )
    subject = trainer()
    found: list[tuple[float, float]] = []
    for room, asked in ((2**28, [0, 1, 3, 4]), (0, [0, 1, 3, 4] * 2), (150, [0, 1, 3, 4, 3, 4])):
        monkeypatch.setattr(batches_module, "MOST_KEPT", room)
        data = Numbers()
        holdout = Holdout(data, Maker(), checked)  # pyright: ignore[reportArgumentType]
        found += [holdout.loss(subject, 2) for _ in range(2)]
        assert data.asked == asked
    assert len(set(found)) == 1


class Board:
    """TensorBoard's writer, as far as it is used."""

    made: ClassVar[list["Board"]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.is_closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        Board.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Run:
    """A run of wandb, as far as it is used."""

    made: ClassVar[list["Run"]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.is_finished = options, False
        self.lines: list[tuple[int, dict[str, float]]] = []
        json.dumps(options["config"])
        Run.made.append(self)

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


def test_viewers_get_the_numbers_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = types.ModuleType("torch.utils.tensorboard")
    wandb = types.ModuleType("wandb")
    board.SummaryWriter, wandb.init = Board, Run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(Board, "made", [])
    monkeypatch.setattr(Run, "made", [])
    run = tmp_path / "run"
    options: dict[str, Any] = {"tensorboard": True, "wandb": "ink", "eval_every": 2}
    options["eval"] = (str(tmp_path / "chats.jsonl"),)
    for steps in (2, 3):
        assert run_sft(config(run, steps=steps, **options)) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    shown = [(line.pop("step"), line) for line in lines]
    assert [step for step, _ in shown] == [1, 2, 2, 3, 3]
    assert [line for one in Run.made for line in one.lines] == shown
    wanted = [(name, value, step) for step, line in shown for name, value in line.items()]
    assert [scalar for one in Board.made for scalar in one.scalars] == wanted
    assert [one.purge_step for one in Board.made] == [1, 3]
    assert all(one.is_closed for one in Board.made)
    assert all(one.is_finished for one in Run.made)
    assert len({one.options["id"] for one in Run.made}) == 1, "it goes on as the same run"
    assert Run.made[0].options["project"] == "ink"


def test_an_interrupt_while_the_data_are_read_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("suzuri.training.sft.check_data", interrupted)
    (data,) = config(tmp_path / "run").train
    words = ["sft", "--model=tiny", "--random-weights", f"--train={data}"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, f"--run_dir={tmp_path / 'run'}"])
    assert end.value.code == 130
    assert capsys.readouterr().err.strip().endswith("suzuri sft: interrupted")


def test_an_empty_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wandb is empty"):
        config(tmp_path / "run", wandb=" ")
