"""Runs of `suzuri sft`: they learn, go on with the same bits, and refuse what is not theirs."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from suzuri import cli
from suzuri.config import load_recipe
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.training.config import OptimizerConfig, SftConfig, TrainingConfig
from suzuri.training.initial import draw_weights
from suzuri.training.recipe import parse_sft
from suzuri.training.run_dir import RunDir
from suzuri.training.sft import run_sft
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Conversation
from tests.model.models import random_model

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "sft_chat.py"
CHATS = ROOT / "recipes" / "data" / "chats.jsonl"


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """A dozen of the chats, so that reading them takes no time."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(CHATS.read_text("utf-8").splitlines(keepends=True)[:12]), "utf-8")
    return str(path)


def small(chats: str, run_dir: Path, **fields: Any) -> SftConfig:
    config = SftConfig(
        model="tiny",
        random_weights=True,
        train=(chats,),
        eval=(chats,),
        run_dir=str(run_dir),
        steps=6,
        batch_size=3,
        eval_every=2,
        eval_size=3,
        save_every=2,
        trainer=TrainingConfig(bias_rate=0.01, draft_loss_weight=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=2),
    )
    return dataclasses.replace(config, **fields).resolve()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines without what time does to them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def test_tiny_learns_sixty_four_chats_by_heart(tmp_path: Path) -> None:
    config = dataclasses.replace(load_recipe(str(RECIPE), SftConfig), run_dir=str(tmp_path / "run"))
    assert run_sft(config.resolve()) == 0
    evaluations = [line["eval/loss"] for line in metrics(tmp_path / "run") if "eval/loss" in line]
    assert len(evaluations) == 3
    assert evaluations[-1] < 0.01 < evaluations[0]
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert document["config"]["optimizer"]["learning_rate"] == 2e-2


def test_a_line_holds_what_the_step_did(chats: str, tmp_path: Path) -> None:
    assert run_sft(small(chats, tmp_path / "run")) == 0
    lines = metrics(tmp_path / "run")
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 4, 6]
    rates = [line["optim/learning_rate"] for line in steps]
    assert rates[:2] == [0.005, 0.01]
    assert rates[-1] == pytest.approx(0.001)
    assert [line["data/epoch"] for line in steps] == [i * 3 / 12 for i in range(1, 7)]
    assert all(0 < line["data/weight"] < line["data/tokens"] for line in steps)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert 6 < steps[0]["train/draft_loss"] < 9
    assert steps[0]["experts/e_frac_with_tokens:mean"] > 0.5
    assert sorted(p.name for p in (tmp_path / "run" / "states").iterdir()) == ["step-4", "step-6"]


def test_published_weights_are_those_of_the_state(chats: str, tmp_path: Path) -> None:
    config = small(chats, tmp_path / "run", steps=2)
    assert run_sft(config) == 0
    subject = random_model("tiny", torch.bfloat16)
    trainer = LocalTrainer(subject, config.trainer, FullVocabulary())
    trainer.load_state(tmp_path / "run" / "states" / "step-2")
    served = Inkling(subject.config, dtype=torch.bfloat16)
    load_weights(served, tmp_path / "run" / "weights", want=PARTS)
    for name, parameter in subject.named_parameters():
        assert torch.equal(parameter, dict(served.named_parameters())[name]), name
    # And they are what the next run starts from.
    again = small(
        chats, tmp_path / "next", model=str(tmp_path / "run" / "weights"), random_weights=False
    )
    assert run_sft(again) == 0
    first, second = metrics(tmp_path / "run"), metrics(tmp_path / "next")
    assert second[0]["train/loss"] < first[0]["train/loss"]


KILLED = """
import os, signal, sys
from suzuri import cli
from suzuri.training.run_dir import RunDir

write, lines = RunDir.write, []

def write_or_die(self, line):
    write(self, line)
    lines.append(line)
    if len(lines) == 6:
        os.kill(os.getpid(), signal.SIGKILL)

RunDir.write = write_or_die
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_killed_run_goes_on_with_the_same_bits(chats: str, tmp_path: Path) -> None:
    """R12, R13: killed -9 in the middle, the lines are those of a run that nobody killed."""
    options: dict[str, Any] = {"steps": 9, "save_every": 3}
    whole = small(chats, tmp_path / "whole", **options)
    killed = small(chats, tmp_path / "killed", **options)
    flags = ["--model=tiny", f"--train={chats}", f"--eval={chats}", "--random-weights"]
    flags += ["--steps=9", "--batch_size=3", "--eval-every=2", "--eval_size=3", "--save-every=3"]
    flags += ["--trainer.bias_rate=0.01", "--trainer.draft-loss-weight=0.1"]
    flags += ["--optimizer.learning_rate=1e-2", "--optimizer.warmup=2"]
    child = subprocess.run(
        [sys.executable, "-c", KILLED, "sft", *flags, f"--run_dir={killed.run_dir}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    lines = tmp_path / "killed" / "metrics.jsonl"
    assert lines.read_bytes().count(b"\n") == 6
    assert run_sft(whole) == 0
    assert run_sft(killed) == 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    one, other = (read_weights(tmp_path / name / "weights") for name in ("killed", "whole"))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def read_weights(folder: Path) -> dict[str, Any]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_what_a_kill_left_half_written_is_put_right(chats: str, tmp_path: Path) -> None:
    """A torn line, lines after the state, half a state, half of the weights, an older state."""
    run = tmp_path / "run"
    config = small(chats, run)
    assert run_sft(config) == 0
    wanted = metrics(run)
    lines = (run / "metrics.jsonl").read_bytes()
    for there in (lines[:-40], lines, b""):
        (run / "metrics.jsonl").write_bytes(there)
        shutil.rmtree(run / "states" / "step-6")
        (run / "states" / "step-6-00ff.part").mkdir()
        (run / "weights.new").mkdir()
        (run / "weights.new" / "config.json").write_text("{")
        assert run_sft(config) == 0
        if there:
            assert metrics(run) == wanted
        else:
            assert [line["step"] for line in metrics(run)] == [5, 6, 6]
        assert not list(run.glob("states/*.part*"))
        assert not (run / "weights.new").exists()


def test_a_finished_run_has_nothing_to_do_and_more_steps_go_on(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    constant = OptimizerConfig(learning_rate=1e-3, schedule="constant")
    options: dict[str, Any] = {"optimizer": constant, "eval": (), "eval_size": None}
    assert run_sft(small(chats, run, steps=3, **options)) == 0
    stamp = (run / "weights" / "config.json").stat().st_mtime_ns
    assert run_sft(small(chats, run, steps=3, **options)) == 0
    assert (run / "weights" / "config.json").stat().st_mtime_ns == stamp
    assert run_sft(small(chats, run, steps=5, save_every=9, keep=1, **options)) == 0
    assert run_sft(small(chats, tmp_path / "whole", steps=5, **options)) == 0
    assert metrics(run) == metrics(tmp_path / "whole")
    assert [p.name for p in (run / "states").iterdir()] == ["step-5"]
    with pytest.raises(ValueError, match=r"steps = 4: .* has come to step 5 already"):
        run_sft(small(chats, run, steps=4, **options))
    assert "5 steps done" in capsys.readouterr().out.splitlines()[-1]


def test_evaluation_changes_no_bit_of_the_training(chats: str, tmp_path: Path) -> None:
    assert run_sft(small(chats, tmp_path / "with", eval_every=1)) == 0
    assert run_sft(small(chats, tmp_path / "without", eval=(), eval_size=None)) == 0
    trained = [line for line in metrics(tmp_path / "with") if "train/loss" in line]
    assert trained == metrics(tmp_path / "without")


def test_other_settings_and_other_data_are_refused(chats: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_sft(small(chats, run, steps=1)) == 0
    lines = (run / "metrics.jsonl").read_bytes()
    other = dataclasses.replace(
        small(chats, run), batch_size=4, optimizer=OptimizerConfig(learning_rate=0.5)
    )
    with pytest.raises(ValueError, match=r"batch_size \(3 there, 4 here\), optimizer\.learning_r"):
        run_sft(other)
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes(Path(chats).read_bytes())
    assert run_sft(small(str(copied), run, steps=1)) == 0, "the same data elsewhere"
    copied.write_bytes(Path(chats).read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"differs in train \(the data are not what they were\)"):
        run_sft(small(str(copied), run, eval=(chats,)))
    assert (run / "metrics.jsonl").read_bytes() == lines
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis\.tex and no config\.json"):
        run_sft(small(chats, tmp_path / "mine"))


def test_bad_data_stop_a_run_before_it_starts(chats: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(Path(chats).read_text() + '{"messages": []}\nnonsense\n')
    with pytest.raises(ValueError, match=r"2 of 14 (.|\n)*bad\.jsonl:13: (.|\n)*bad\.jsonl:14: "):
        run_sft(small(str(bad), tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()
    assert run_sft(small(str(bad), tmp_path / "run", skip_bad=True, steps=2)) == 0
    trained = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["data/skipped"] for line in trained] == [2, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squares:
    """A data set without end; every fifth conversation is broken where `broken`."""

    broken: bool = False

    @property
    def size(self) -> int | None:
        return None

    def conversation(self, index: int) -> Conversation:
        answer = "" if self.broken and index % 5 == 4 else str(index**2)
        return Conversation(
            messages=[
                {"role": "user", "content": f"{index} squared?"},
                {"role": "assistant", "content": answer},
            ],
            effort="low",
        )


def test_a_data_set_without_end(chats: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"train": (), "dataset": Squares(), "eval": ()}
    options |= {"eval_dataset": Squares()}
    assert run_sft(small(chats, run, **options)) == 0
    assert (tmp_path / "run" / "config.json").read_text().count("Squares(broken=False)") == 2
    options["dataset"] = Squares(broken=True)
    with pytest.raises(ValueError, match="dataset"):
        run_sft(small(chats, run, **options))
    with pytest.raises(ValueError, match=r"step 2: conversation 4: .*content is empty"):
        run_sft(small(chats, tmp_path / "broken", **options))
    assert run_sft(small(chats, tmp_path / "skipped", skip_bad=True, **options)) == 0
    trained = [line for line in metrics(tmp_path / "skipped") if "train/loss" in line]
    assert [line["data/skipped"] for line in trained] == [0, 1, 0, 1, 1, 0]
    assert [line["data/samples"] for line in trained] == [3, 2, 3, 2, 2, 3]
    with pytest.raises(ValueError, match="no end: give steps"):
        small(chats, run, **options, steps=None)
    with pytest.raises(ValueError, match="no end: give eval_size"):
        small(chats, run, **options, eval_size=None)
    with pytest.raises(ValueError, match="batch_tokens needs"):
        small(chats, run, **options, batch_tokens=100)


def test_a_loss_that_is_no_number_stops_with_the_state_before_it(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    real = LocalTrainer.forward_backward

    def broken(self: LocalTrainer, *args: Any) -> Any:
        if self.num_steps == 3:
            with torch.no_grad():
                self.model.decoder.norm.weight.fill_(torch.nan)
        return real(self, *args)

    monkeypatch.setattr(LocalTrainer, "forward_backward", broken)
    assert run_sft(small(chats, tmp_path / "run")) == 1
    text = capsys.readouterr().err
    assert "step 4: the loss is nan" in text
    assert f"The last state is {tmp_path / 'run' / 'states' / 'step-2'}" in text
    assert max(line["step"] for line in metrics(tmp_path / "run")) == 3
    monkeypatch.undo()
    assert run_sft(small(chats, tmp_path / "run")) == 0
    assert run_sft(small(chats, tmp_path / "whole")) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    real, left = LocalTrainer.optim_step, list[int]()

    def interrupted(self: LocalTrainer, *args: Any) -> Any:
        if self.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert not left
            os.kill(os.getpid(), signal.SIGINT)
            assert left == [130], "the second leaves at once"
        return real(self, *args)

    monkeypatch.setattr(os, "_exit", left.append)

    monkeypatch.setattr(LocalTrainer, "optim_step", interrupted)
    assert run_sft(small(chats, tmp_path / "run")) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    out = capsys.readouterr().out
    state = tmp_path / "run" / "states" / "step-3"
    assert out == f"stopped after step 3 of 6; the same command again goes on from {state}\n"
    assert state.is_dir()
    monkeypatch.undo()
    assert run_sft(small(chats, tmp_path / "run")) == 0
    assert run_sft(small(chats, tmp_path / "whole")) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_towers_learn_from_lines_with_pictures_and_clips(tmp_path: Path) -> None:
    """M19: text embeddings have a gradient in batches with media."""
    Image.new("RGB", (70, 50), (9, 90, 200)).save(tmp_path / "blue.png")
    wave_N = (9000 * np.sin(np.arange(4000) / 7)).astype("<i2")
    with wave.open(str(tmp_path / "tone.wav"), "wb") as clip:
        clip.setparams((1, 2, 16000, 0, "NONE", ""))
        clip.writeframes(wave_N.tobytes())
    parts = [
        {"type": "image_url", "image_url": {"url": "blue.png"}},
        {"type": "audio", "audio": "tone.wav"},
        {"type": "text", "text": "What is it?"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Blue."}]
    data = tmp_path / "media.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n")
    options: dict[str, Any] = {"eval": (), "eval_size": None, "batch_size": 1}
    assert run_sft(small(str(data), tmp_path / "run", steps=8, **options)) == 0
    lines = metrics(tmp_path / "run")
    assert lines[-1]["train/loss"] < 0.5 * lines[0]["train/loss"]
    fresh = random_model("tiny", torch.bfloat16)
    draw_weights(fresh, 0)
    before = {name: x.detach().clone() for name, x in fresh.named_parameters()}
    load_weights(fresh, tmp_path / "run" / "weights", want=PARTS)
    moved = {name for name, x in fresh.named_parameters() if not torch.equal(x, before[name])}
    assert {"vision", "audio", "decoder"} <= {name.partition(".")[0] for name in moved}
    assert "decoder.embed.weight" in moved


def test_steps_by_tokens_go_through_the_data_once(chats: str, tmp_path: Path) -> None:
    config = small(chats, tmp_path / "run", steps=None, batch_tokens=120, eval=(), eval_size=None)
    assert run_sft(config) == 0
    lines = metrics(tmp_path / "run")
    assert sum(line["data/samples"] for line in lines) == 12
    assert all(line["data/tokens"] <= 120 for line in lines)
    assert lines[-1]["data/epoch"] == 1.0


def test_recipes_and_flags(chats: str, tmp_path: Path) -> None:
    flags = ["--run_dir=x", "--steps", "20", "--trainer.token_budget=99", "--optimizer.warmup=3"]
    config = parse_sft([str(RECIPE), *flags])
    assert (config.run_dir, config.steps, config.trainer.token_budget) == ("x", 20, 99)
    assert (config.optimizer.warmup, config.optimizer.learning_rate) == (3, 2e-2)
    assert config.random_weights
    assert not parse_sft([str(RECIPE), "--no-random-weights"]).random_weights
    assert parse_sft(["--model", "tiny", "--random-weights", "--train", "a", "b"]).train == (
        "a",
        "b",
    )
    with pytest.raises(SystemExit):
        parse_sft([str(RECIPE), "--dataset", "x"])
    recipe = tmp_path / "own.py"
    recipe.write_text(
        "import dataclasses\n"
        "from suzuri.training.config import SftConfig\n"
        "from suzuri.types import Conversation\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Own:\n"
        "    size: 'int' = 4\n"
        "    def conversation(self, index):\n"
        "        return Conversation(text='abc' * (index + 1))\n"
        "config = SftConfig(dataset=Own(), steps=3)\n"
    )
    own = parse_sft([str(recipe), "--steps=4"])
    assert own.dataset is not None
    assert own.dataset.conversation(1).text == "abcabc"
    recipe.write_text("conf = 1\n")
    with pytest.raises(ValueError, match=r"must define config = SftConfig"):
        load_recipe(str(recipe), SftConfig)
    with pytest.raises(ValueError, match="no such file"):
        load_recipe(str(tmp_path / "absent.py"), SftConfig)
    recipe.write_text(
        "from suzuri.training.config import SftConfig\n\nconfig = SftConfig(stepz=3)\n"
    )
    with pytest.raises(ValueError, match=r"recipe .*, line 3: .*'stepz'"):
        load_recipe(str(recipe), SftConfig)


def test_the_command_runs_a_recipe(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", str(RECIPE), f"--train={chats}", f"--eval={chats}", "--steps=1"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, f"--run_dir={tmp_path / 'run'}"])
    assert not end.value.code
    assert capsys.readouterr().out.startswith("1 steps done, loss ")
    for flag, reason in (("--model=nothing", "no preset"), ("--device=tpu", "--device tpu")):
        with pytest.raises(SystemExit) as end:
            cli.main([*words, f"--run_dir={tmp_path / 'other'}", flag])
        assert end.value.code == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["sft", "--model=tiny", "--train", chats, f"--run-dir={tmp_path / 'other'}"])
    assert end.value.code == 2
    assert "shape without weights" in capsys.readouterr().err


def test_missing_packages_are_named(chats: str, tmp_path: Path, monkeypatch: Any) -> None:
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    for field, value in (("tensorboard", True), ("wandb", "project")):
        with pytest.raises(ValueError, match=f"pip install {field}"):
            run_sft(small(chats, tmp_path / "run", **{field: value}))


def test_two_processes_do_not_share_a_folder(chats: str, tmp_path: Path) -> None:
    with (
        RunDir(tmp_path / "run"),
        pytest.raises(ValueError, match="in use by another process"),
    ):
        run_sft(small(chats, tmp_path / "run"))


def test_learning_rates() -> None:
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup=4, final_fraction=0.2)
    rates = [linear.rate(step, 12) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert np.allclose(rates[4:], 1 - 0.1 * np.arange(1, 9))
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine", final_fraction=0.0)
    assert cosine.rate(1, 11) == 2.0 and cosine.rate(6, 11) == pytest.approx(1.0)
    assert cosine.rate(1, 1) == linear.rate(4, 4) * 2.0 == 2.0, "short runs learn, too"
    assert cosine.rate(10, 10) == pytest.approx(0.0)
    assert OptimizerConfig(learning_rate=3.0, schedule="constant").rate(7, 9) == 3.0
    for field, value in (("warmup", -1), ("beta1", 1.0), ("final_fraction", 2), ("eps", -1.0)):
        with pytest.raises(ValueError, match=field):
            OptimizerConfig(**{field: value})  # pyright: ignore[reportArgumentType]


def test_drawn_weights_keep_activations_at_their_size() -> None:
    model = random_model("tiny").requires_grad_(False)
    draw_weights(model, 0)
    parameters = dict(model.named_parameters())
    assert float(parameters["decoder.embed.weight"].std()) == pytest.approx(1, rel=0.05)
    assert float(parameters["decoder.layers.5.mlp.gate_up"].std()) == pytest.approx(
        48**-0.5, rel=0.05
    )
    assert bool((parameters["decoder.norm.weight"] == 1).all())
    hidden_ND = torch.randn(500, 48, generator=torch.Generator().manual_seed(0))
    assert float(model.decoder.logits(hidden_ND).std()) == pytest.approx(1, rel=0.1)
