"""What is pending after an error: all of it or nothing, so that the next step is a sound one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.training.checkpoint import content_hash
from suzuri.training.config import OptimizerConfig
from suzuri.training.trainer import LocalTrainer
from suzuri.types import AdamParams, Sample
from tests.training.samples import samples, trainer

STEP = AdamParams(learning_rate=1e-3)


def weighted(values: list[float]) -> Sample:
    count = len(values)
    return Sample(
        tokens=list(range(5, 5 + count)),
        inputs={"target_tokens": np.arange(6, 6 + count), "weights": np.array(values)},
    )


def is_clear(subject: LocalTrainer) -> bool:
    return (
        subject.weight_sum == 0
        and all(p.grad is None for p in subject.optimizer.parameters.values())
        and not any(bool(counts.any()) for counts in subject.loads.counts.values())
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_an_error_half_way_leaves_nothing_pending(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of three micro-batches; whoever tries again gets the gradient of the rest."""
    subject, real = trainer(token_budget=10, bias_rate=0.1), LocalTrainer._backward
    calls: list[int] = []

    def broken(self: LocalTrainer, loss: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error("no memory")
        real(self, loss)

    subject.forward_backward(samples((6,)), "cross_entropy")
    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "_backward", broken)
        with pytest.raises(error):
            subject.forward_backward(samples((9, 8, 7)), "cross_entropy")
    assert len(calls) == 3
    assert is_clear(subject)
    fresh = trainer(token_budget=10, bias_rate=0.1)
    for one in (subject, fresh):
        one.forward_backward(samples((9, 8, 7)), "cross_entropy")
        one.optim_step(STEP)
    assert content_hash(subject.model) == content_hash(fresh.model)


def test_an_error_of_forward_leaves_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, fresh = trainer(), trainer()
    for one in (subject, fresh):
        one.forward_backward(samples(), "cross_entropy")
    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "_losses", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            subject.forward(samples(), "cross_entropy")
    for one in (subject, fresh):
        one.optim_step(STEP)
    assert content_hash(subject.model) == content_hash(fresh.model)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_after_a_number_that_is_none_no_expert_counts_are_left(where: str) -> None:
    subject = trainer(bias_rate=0.1)
    subject.forward_backward(samples(), "cross_entropy")
    if where == "loss":
        with torch.no_grad():
            subject.model.decoder.norm.weight[0] = math.nan
    else:
        gradient = subject.optimizer.parameters["decoder.norm.weight"].grad
        assert gradient is not None
        gradient[0] = math.nan
    with pytest.raises(FloatingPointError):
        subject.forward_backward(samples(), "cross_entropy")
        subject.optim_step(STEP)
    assert is_clear(subject)


@pytest.mark.parametrize("weights", [[-1.0, -2.0, -0.5], [1.0, -1.0, 0.0]])
def test_a_weight_sum_that_cannot_divide_is_refused_and_nothing_is_lost(
    weights: list[float],
) -> None:
    """Weights below 0 are how a loss of one's own is given; its sum is then meant as it is."""
    subject = trainer()
    subject.forward_backward([weighted(weights)], "cross_entropy")
    before = content_hash(subject.model)
    with pytest.raises(ValueError, match=r"sum to .*normalise=False"):
        subject.optim_step(STEP)
    assert content_hash(subject.model) == before
    assert subject.num_steps == 0
    assert subject.optim_step(AdamParams(normalise=False))["grad_norm"] > 0
    assert is_clear(subject)


def test_a_step_without_weight_or_samples_changes_nothing() -> None:
    subject = trainer()
    before = content_hash(subject.model)
    output = subject.forward_backward([weighted([0.0, 0.0])], "cross_entropy")
    assert (output.loss_sum, output.weight_sum) == (0.0, 0.0)
    assert subject.optim_step(STEP) == {"grad_norm": 0.0, "moved": 0.0}
    assert subject.forward_backward([], "cross_entropy").logprobs == []
    assert subject.optim_step(STEP) == {"grad_norm": 0.0}
    assert content_hash(subject.model) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", "1e-3"),
        ("learning_rate", True),
        ("weight_decay", math.inf),
        ("eps", -1.0),
        ("grad_clip_norm", -1.0),
        ("beta1", 1.0),
        ("beta2", math.nan),
        ("beta2", None),
    ],
)
def test_a_step_that_would_ruin_the_weights_is_refused(field: str, value: Any) -> None:
    for kind in (AdamParams, OptimizerConfig):
        with pytest.raises(ValueError, match=f"{field} = "):
            kind(**{field: value})
    of_numpy: Any = {field: np.float32(0.5)}
    assert getattr(AdamParams(**of_numpy), field) == 0.5


def test_frozen_selection_biases_stay() -> None:
    subject = trainer(bias_rate=0.1, frozen=("decoder.layers.5.*", "*.4.mlp.router.bias"))
    before = {n: p.detach().clone() for n, p in subject.model.named_parameters()}
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(STEP)
    moved = {
        n.removeprefix("decoder.layers.").partition(".")[0]
        for n, p in subject.model.named_parameters()
        if n.startswith("decoder.") and n.endswith("router.bias") and not torch.equal(p, before[n])
    }
    assert moved
    assert not moved & {"4", "5"}
    assert not any(bool(counts.any()) for counts in subject.loads.counts.values())


def test_a_state_is_not_written_over_what_is_none(tmp_path: Path) -> None:
    subject = trainer()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match="is no saved state; give a new path"):
            subject.save_state(tmp_path / name)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        subject.save_state(tmp_path / "empty")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["empty", "file", "mine"]


@pytest.mark.parametrize("other", [{"frozen": ("*.attn.*",)}, {"model": "inkling-nano"}])
def test_a_state_that_does_not_fit_changes_nothing(other: dict[str, Any], tmp_path: Path) -> None:
    subject = trainer()
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(STEP)
    subject.save_state(tmp_path / "state")
    victim = trainer(**other)
    before = content_hash(victim.model)
    with pytest.raises(ValueError, match="saved state"):
        victim.load_state(tmp_path / "state")
    assert content_hash(victim.model) == before
    assert victim.num_steps == 0


def test_a_disk_that_takes_no_state_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer tells it as a trace of each rank."""
    subject = trainer()
    subject.save_state(tmp_path / "good")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"the state could not be written, .* MB are free.*No space"):
        subject.save_state(tmp_path / "bad")
    assert [one.name for one in tmp_path.iterdir()] == ["good"]
