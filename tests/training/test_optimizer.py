"""The optimizer's step on a CPU: seen by what is kept of a weight, and equal on any threads."""

import pytest
import torch
from torch import nn

from suzuri.kernels import exact
from suzuri.training.optimizer import STILL_STEPS, Optimizer
from suzuri.types import AdamParams
from tests.kernels.compare import assert_same_bits, threads

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (300, 257), "odd": (7, 13), "one": (1,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def stepped(subject: Optimizer, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in subject.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        subject.step(AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0), 3.0)


@DTYPES
def test_the_kept_copy_of_a_weight_follows_a_step(dtype: torch.dtype) -> None:
    held = parameters(dtype)
    subject, weight = Optimizer(held.items()), held["wide"]
    for _ in range(2):
        before = exact.transposed(weight)
        assert exact.transposed(weight) is before
        stepped(subject, 1)
        after = exact.transposed(weight)
        assert (after != before).any()
        assert_same_bits(torch.from_numpy(after), weight.detach().float().T.contiguous(), "kept")


@DTYPES
def test_a_step_has_equal_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for count in (1, 2, 3):
        with threads(count):
            subject = Optimizer(parameters(dtype).items())
            stepped(subject, 3)
            found.append(subject.state())
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, x in other.items():
            assert_same_bits(x, found[0][name], name)


def one_step(subject: Optimizer, rate: float) -> dict[str, float]:
    for parameter in subject.parameters.values():
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    return subject.step(AdamParams(learning_rate=rate), 0.0)


@pytest.mark.parametrize(("rate", "least", "most"), [(1e-9, 0.0, 0.0), (1e-3, 0.05, 0.95)])
def test_r16_a_step_says_how_many_served_weights_it_moved(
    rate: float, least: float, most: float
) -> None:
    """Half a unit in the last place of 1.0 is 2**-8: a step of 1e-3 moves the small numbers only,
    one of 1e-9 nothing but what is near 0."""
    subject = Optimizer(parameters(torch.bfloat16).items())
    found = one_step(subject, rate)["moved"]
    assert least <= found <= most
    assert one_step(Optimizer(parameters(torch.float32).items()), 0.1)["moved"] == 1.0


def test_r16_steps_that_move_nothing_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = Optimizer(parameters(torch.bfloat16).items())
    with caplog.at_level("WARNING"):
        for _ in range(STILL_STEPS - 1):
            one_step(subject, 1e-9)
        one_step(subject, 0.0)  # asked not to move: no fault, and it does not count
        one_step(subject, 0.1)
        assert not caplog.records
        for _ in range(STILL_STEPS + 5):
            one_step(subject, 1e-9)
    (record,) = caplog.records
    assert "learning rate of 1e-09" in record.getMessage()


@DTYPES
def test_a_state_goes_on_where_the_parameters_are(dtype: torch.dtype) -> None:
    """It is read on the CPU. The meta device stands for a GPU: what is mixed there is refused."""
    saved = Optimizer(parameters(dtype).items())
    stepped(saved, 1)
    for parameter in saved.parameters.values():
        parameter.grad = torch.ones(parameter.shape)
    state = {name: tensor.clone() for name, tensor in saved.state().items()}
    there = {name: nn.Parameter(p.detach().to("meta")) for name, p in parameters(dtype).items()}
    subject = Optimizer(there.items())
    subject.load(state)
    found = subject.state()
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        # AdamW counts its steps on the CPU, so that no step waits for a GPU.
        expected = "cpu" if name.startswith("adam.step.") else "meta"
        assert tensor.device.type == expected, name
        assert tensor.dtype == state[name].dtype and tensor.shape == state[name].shape, name
