"""Runs of `suzuri rl` on tiny: the divergence is 0, and a run goes on with the same bits."""

import asyncio
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri import cli
from suzuri.config import load_recipe, name_of
from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Outcome
from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits
from suzuri.envs.task_env import TaskProblems
from suzuri.envs.verifiable import JsonlProblems
from suzuri.rl import local_sampler
from suzuri.rl.algorithms.grpo import Grpo, dapo
from suzuri.rl.algorithms.overlong import OverlongPenalty
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.rl.recipe import parse_rl
from suzuri.rl.run import publication_metrics, run_rl
from suzuri.training.config import OptimizerConfig
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Answer, Prompt, SampleParams

ROOT = Path(__file__).parents[2]


class Even:
    """Rewards answers by their share of even ids, which random weights draw half the time."""

    def __init__(self, index: int) -> None:
        self._index = index

    async def initial(self) -> Prompt:
        return Prompt(tokens=[10, 11, 20 + self._index % 50])

    async def step(self, answer: Answer) -> Outcome:
        even = sum(token % 2 == 0 for token in answer.tokens)
        return Outcome(reward=even / max(len(answer.tokens), 1))


class EvenGroup:
    name = "even"

    def __init__(self, index: int) -> None:
        self._index = index

    def envs(self, count: int) -> list[Even]:
        return [Even(self._index) for _ in range(count)]

    async def rewards(self, trajectories: Any) -> list[float]:
        return [0.0] * len(trajectories)


class EvenProblems:
    def __init__(self, first: int, prompts: ChatPrompts) -> None:
        del prompts
        self._first = first
        self.size: int | None = None

    def group(self, index: int) -> EvenGroup:
        return EvenGroup(self._first + index)


def small(run_dir: Path, **fields: Any) -> RlConfig:
    config = RlConfig(
        model="tiny",
        random_weights=True,
        problems=functools.partial(EvenProblems, 0),
        eval_problems=functools.partial(EvenProblems, 7),
        algorithm=Grpo(),
        steps=6,
        groups=2,
        group_size=3,
        limits=Limits(max_tokens=6, max_context=64),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="constant"),
        evaluation=EvaluationConfig(every=3, size=2),
        save_every=2,
        memory_gb=3.0,
        run_dir=str(run_dir),
    )
    return dataclasses.replace(config, **fields).resolve()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines without what time does to them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "publish/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("rl") / "whole"
    assert run_rl(small(folder)) == 0
    return folder


def test_sampler_and_trainer_agree_at_every_step(whole: Path) -> None:
    lines = metrics(whole)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 3, 6]
    steps = lines[1:]
    assert [line["kl/sampler_trainer_max"] for line in steps] == [0.0] * 6
    assert [line["sampler/version"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["kl/tokens"] > 0 for line in steps)
    assert all(line["optim/grad_norm"] > 0 for line in steps)
    assert len({line["optim/grad_norm"] for line in steps}) == 6, "the weights move"


def test_what_was_said_can_be_read(whole: Path) -> None:
    files = sorted((whole / "transcripts").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in range(1, 7)]
    lines = [json.loads(line) for line in files[-1].read_text("utf-8").splitlines()]
    assert len(lines) == 2 * 3
    assert {line["name"] for line in lines} == {"even"}
    (turn,) = lines[0]["turns"]
    assert turn["versions"] == [5] and turn["answer"]
    assert isinstance(lines[0]["reward"], float)


def test_states_and_weights_are_left(whole: Path) -> None:
    assert sorted(p.name for p in (whole / "states").iterdir()) == ["step-4", "step-6"]
    assert (whole / "weights" / "config.json").is_file()
    document = json.loads((whole / "config.json").read_text())
    assert document["config"]["algorithm"].startswith("Grpo(")


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = LocalTrainer.optim_step

    def interrupted(self: LocalTrainer, *args: Any) -> Any:
        if self.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args)

    monkeypatch.setattr(LocalTrainer, "optim_step", interrupted)
    assert run_rl(small(tmp_path / "run")) == 130
    assert "stopped after step 3 of 6" in capsys.readouterr().out
    monkeypatch.undo()
    assert run_rl(small(tmp_path / "run")) == 0
    assert metrics(tmp_path / "run") == metrics(whole)


RECIPE = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.rl.test_run import small
config = small(Path({run_dir!r}), steps=40)
"""


def test_a_run_that_was_killed_goes_on_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """R12: kill -9 at any moment: during rollouts, training or publication."""
    recipe, run_dir = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(RECIPE.format(root=str(ROOT), run_dir=str(run_dir)))
    command = [sys.executable, "-m", "suzuri", "rl", str(recipe), "--steps=6"]
    for count in (3, 5):
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        lines = run_dir / "metrics.jsonl"
        end = time.monotonic() + 120
        while not (lines.exists() and lines.read_bytes().count(b"\n") >= count):
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)  # and leave the cores to the run
        child.kill()
        child.wait()
    assert run_rl(small(run_dir)) == 0
    assert metrics(run_dir) == metrics(whole)


@pytest.mark.parametrize("on_publish", ["finish", "continue", "restart"])
def test_with_a_lag_older_weights_draw_and_it_shows(tmp_path: Path, on_publish: Any) -> None:
    config = small(
        tmp_path / "run", lag=1, on_publish=on_publish, steps=5, limits=Limits(max_tokens=20)
    )
    assert run_rl(config) == 0
    steps = metrics(tmp_path / "run")[1:]
    assert all(line["lag/tokens:max"] <= 1 for line in steps)
    behind = [line["kl/sampler_trainer_max"] > 0 for line in steps]
    assert behind == [line["lag/tokens:max"] > 0 for line in steps]


def test_at_another_temperature_both_see_the_distribution_that_was_drawn_from(
    tmp_path: Path,
) -> None:
    limits = Limits(max_tokens=6, max_context=64, temperature=0.7)
    assert run_rl(small(tmp_path / "run", limits=limits, steps=2)) == 0
    steps = metrics(tmp_path / "run")[1:]
    assert [line["kl/sampler_trainer_max"] for line in steps] == [0.0, 0.0]
    assert all(line["optim/grad_norm"] > 0 for line in steps)


def test_a_planted_ulp_shows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local_sampler.LocalSampler.publish

    async def nudged(self: Any, model: Any) -> int:
        version = await real(self, model)
        weight = self.engine.model.get_parameter("decoder.unembed.weight")
        with torch.no_grad():
            bits = weight.view(torch.int16)
            bits[0, 0] += 1
            weight.copy_(bits.view(torch.bfloat16))
        return version

    monkeypatch.setattr(local_sampler.LocalSampler, "publish", nudged)
    assert run_rl(small(tmp_path / "run", steps=1)) == 0
    assert metrics(tmp_path / "run")[-1]["kl/sampler_trainer_max"] > 0


def test_weights_that_do_not_arrive_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R05."""
    real, calls = local_sampler.copy_weights, list[int]()

    def frozen(ours: Any, sent: Any) -> None:
        calls.append(1)
        if len(calls) < 4:
            real(ours, sent)

    monkeypatch.setattr(local_sampler, "copy_weights", frozen)
    assert run_rl(small(tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert "nothing is sampled from them" in error
    assert "The last state is" in error
    monkeypatch.undo()
    assert run_rl(small(tmp_path / "run")) == 0


def test_a_loss_that_is_no_number_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "run", optimizer=OptimizerConfig(learning_rate=1e30))
    assert run_rl(config) == 1
    assert "No state was saved" in capsys.readouterr().err


def test_tasks_are_practised_on_the_model_that_serves(tmp_path: Path) -> None:
    tasks = Mixture(weights={"tools/exchange": 1.0, "pictures": 1.0})
    config = small(
        tmp_path / "run",
        model="inkling-nano",
        problems=functools.partial(TaskProblems, tasks),
        eval_problems=None,
        limits=Limits(max_tokens=8),
        steps=1,
        dtype="float32",
    )
    assert run_rl(config) == 0
    (line,) = metrics(tmp_path / "run")
    assert line["kl/sampler_trainer_max"] == 0.0 and line["kl/tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group_size": 0}, "group_size = 0"),
        ({"lag": -1}, "lag = -1"),
        ({"transcripts": -1}, "transcripts = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"limits": Limits(temperature=0)}, "limits.temperature = 0"),
        ({"max_running": 0}, "max_running = 0"),
    ],
)
def test_a_config_names_what_is_wrong(tmp_path: Path, fields: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small(tmp_path, **fields)
    with pytest.raises(ValueError, match="run_dir is empty"):
        small(Path(" "))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"every": 0}, "every"),
        ({"temperature": -1.0}, "temperature"),
        ({"samples": 4}, "samples = 4"),
    ],
)
def test_an_evaluation_names_what_is_wrong(fields: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EvaluationConfig(**fields)


def test_an_engine_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the evaluation after the last step, too: no attempt takes the blame."""

    def step(self: Engine) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Engine, "step", step)
    assert run_rl(small(tmp_path / "run")) == 1
    assert "a step of the engine failed (MemoryError: no room)" in capsys.readouterr().err


def test_problems_of_other_files_are_another_run(tmp_path: Path) -> None:
    """They are compared by content, not by name."""
    file = tmp_path / "prompts.jsonl"

    def config(answer: str, **fields: Any) -> RlConfig:
        file.write_text(json.dumps({"prompt": "say a", "answer": answer}) + "\n", "utf-8")
        problems = functools.partial(JsonlProblems, [str(file)])
        return small(tmp_path / "run", problems=problems, eval_problems=None, **fields)

    assert run_rl(config("a", steps=1, save_every=1)) == 0
    with pytest.raises(ValueError, match=r"differs in problems \(the data are not what they were"):
        run_rl(config("b", steps=2))
    assert run_rl(config("a", steps=2)) == 0


def test_another_run_is_not_gone_on_with(whole: Path) -> None:
    with pytest.raises(ValueError, match=r"differs in .*group_size"):
        run_rl(small(whole, group_size=4))
    with pytest.raises(ValueError, match="has come to step 6 already"):
        run_rl(small(whole, steps=5))


def test_recipes_are_read_and_flags_lie_over_them(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "recipes" / "nano_arithmetic.py")
    config = parse_rl([path, "--steps=20", "--run_dir=x", "--limits.max_tokens=9", "--lag", "2"])
    assert config is not None
    assert (config.steps, config.run_dir, config.limits.max_tokens, config.lag) == (20, "x", 9, 2)
    assert config.algorithm == load_recipe(path, RlConfig).algorithm
    assert "TaskProblems(Mixture(weights={'arithmetic/" in str(name_of(config.problems))
    for words, code, said in (
        (["--help"], 0, "usage: suzuri rl RECIPE"),
        (["--steps=3"], 2, "give a recipe first"),
        ([str(ROOT / "recipes" / "sft_chat.py")], 2, "must define config = RlConfig"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(["rl", *words])
        assert left.value.code == code
        assert said in "".join(capsys.readouterr())


def test_an_evaluation_counts_what_has_no_reward_as_nothing() -> None:
    from suzuri.rl.evaluate import evaluate
    from tests.rl.fakes import FakeProblems, FakeSampler

    def judge(token: int) -> float:
        if token == 3:
            raise ValueError("three")
        return 1.0

    sampler = FakeSampler()
    config = EvaluationConfig(size=20, samples=2, temperature=0.5)
    found = asyncio.run(evaluate(FakeProblems(judge), sampler, Limits(), config))
    tokens = [(params.seed or 0) % 10 for _, params, _ in sampler.asked]
    assert len(tokens) == 40 and {params.temperature for _, params, _ in sampler.asked} == {0.5}
    assert found["eval/reward"] == pytest.approx(1 - tokens.count(3) / 40)
    assert found["eval/without_reward"] == tokens.count(3) / 40 > 0
    assert found["eval/problems"] == 20 and 0 < found["eval/standard_error"] < 0.2


@pytest.mark.parametrize("cut", ["top_p", "top_k", "min_p", "presence_penalty"])
def test_nothing_may_be_cut_off_what_is_drawn_from(
    cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer would have to cut the same, and masks are not recorded."""
    fields: dict[str, Any] = {cut: 0.9}
    with pytest.raises(TypeError, match=cut):
        Limits(**fields)
    with pytest.raises(TypeError, match=cut):
        SampleParams(max_tokens=1, **fields)
    path = str(ROOT / "recipes" / "nano_arithmetic.py")
    for flag in (f"--limits.{cut}=0.9", f"--{cut}=0.9"):
        with pytest.raises(SystemExit) as left:
            parse_rl([path, flag])
        assert left.value.code == 2
        assert "Unrecognized options" in capsys.readouterr().err


def test_the_engine_is_asked_for_the_whole_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[SamplingParams](), Engine.add

    def add(self: Engine, id: str, prompt: Any, params: SamplingParams, **others: Any) -> Any:
        asked.append(params)
        return real(self, id, prompt, params, **others)

    monkeypatch.setattr(Engine, "add", add)
    limits = Limits(max_tokens=6, max_context=64, temperature=0.8)
    assert run_rl(small(tmp_path / "run", steps=1, eval_problems=None, limits=limits)) == 0
    assert len(asked) == 6
    said = ("max_tokens", "temperature", "seed", "sampled_logprobs", "detokenize", "routing")
    plain = SamplingParams()
    for params in asked:
        assert params.temperature == 0.8
        own = {name: getattr(params, name) for name in said}
        assert params == dataclasses.replace(plain, **own)
    assert (plain.top_p, plain.min_p, plain.presence_penalty) == (1.0, 0.0, 0.0)
    assert plain.repetition_penalty == 1.0 and plain.top_k <= 0


def test_publications_are_measured(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    parts = ("hash", "wait", "pause")
    for line in lines[1:]:
        assert line["publish/gb_per_second"] > 0
        seconds = [line[f"publish/{part}_seconds"] for part in parts]
        assert all(one >= 0 for one in seconds)
        assert sum(seconds) <= line["time/publish_seconds"]
        assert line["time/tokens_per_s"] > 0 and line["time/score_seconds"] == 0.0
    assert publication_metrics({}) == {}
    found = publication_metrics(
        {"bytes": 3e9, "write_seconds": 1.0, "wait_seconds": 7.0, "pause_seconds": 0.5}
    )
    assert found["publish/gb_per_second"] == 2.0 and found["publish/wait_seconds"] == 7.0


def test_a_penalty_for_length_is_part_of_a_run(tmp_path: Path) -> None:
    penalty = OverlongPenalty(longest=6, cache=4, weight=0.5)
    config = small(tmp_path / "run", algorithm=dapo(penalty), steps=1, eval_problems=None)
    assert run_rl(config) == 0
    (line,) = metrics(tmp_path / "run")
    # Answers of 6 tokens, the limit.
    assert line["answers/tokens:mean"] == 6 and line["answers/overlong"] == 6
    assert line["answers/overlong:penalty"] == -0.5
    text = (tmp_path / "run" / "config.json").read_text()
    assert "OverlongPenalty(longest=6, cache=4, weight=0.5)" in text
