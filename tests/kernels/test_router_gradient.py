"""The router's own backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.router import cases, router
from tests.kernels.backward import (
    assert_near,
    backward_cases,
    check_backward,
    check_finite_differences,
)
from tests.kernels.compare import Arguments, assert_same_bits, changed, generator, leaves

TRAINED = ["x_ND", "weight_ED", "global_scale_1"]


def weights(**arguments: Any) -> Tensor:
    return router(**arguments)[1]


def logits(**arguments: Any) -> Tensor:
    return router(**arguments)[2]


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_of_the_weights(device: str, case: str, dtype: torch.dtype):
    check_backward(weights, cases.build(case, dtype, generator(1, device)), TRAINED)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_of_the_logits(device: str, case: str, dtype: torch.dtype):
    check_backward(logits, cases.build(case, dtype, generator(2, device)), TRAINED[:2])


def both(out: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return (out[1] * torch.linspace(-1, 2, out[1].shape[1])).sum() + (out[2] * out[2]).sum()


def test_of_both_at_once_and_the_ids_have_none():
    arguments: Arguments = cases.build("odd", torch.float64, generator(3))
    found, expected = (leaves(arguments, TRAINED) for _ in range(2))
    out = router(**found)
    assert not out[0].requires_grad
    both(out).backward()
    with dispatch.force("reference"):
        both(router(**expected)).backward()
    for name in TRAINED:
        assert_near(found[name].grad, expected[name].grad, 1e-12, name)


def test_finite_differences():
    g = generator(4)
    arguments: Arguments = {
        "x_ND": torch.randn(3, 5, generator=g, dtype=torch.float64),
        "weight_ED": torch.randn(6, 5, generator=g, dtype=torch.float64),
        "bias_R": torch.randn(4, generator=g, dtype=torch.float64),
        "global_scale_1": torch.tensor([0.7], dtype=torch.float64),
        "num_experts_per_token": 2,
        "route_scale": 3.0,
    }
    check_finite_differences(weights, arguments, TRAINED)
    check_finite_differences(logits, arguments, TRAINED[:2])


def test_a_bias_that_asks_for_a_gradient_gets_none():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(5))
    bias = arguments["bias_R"].requires_grad_()
    given = leaves(arguments, TRAINED)
    weights(**given).sum().backward()
    assert bias.grad is None
    assert given["weight_ED"].grad.any()


def test_saturated_logits_and_a_scale_of_zero_have_finite_gradients():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(6))
    arguments["x_ND"] *= 1e4
    arguments["global_scale_1"] = torch.zeros(1)
    given = leaves(arguments, TRAINED)
    (weights(**given) * torch.arange(4)).sum().backward()
    assert all(given[name].grad.isfinite().all() for name in TRAINED)
    assert given["global_scale_1"].grad.any()


def test_a_row_has_its_gradient_whatever_else_is_there():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(7))
    alone = leaves(changed(arguments, x_ND=arguments["x_ND"][3:4]), ["x_ND"])
    among = leaves(arguments, ["x_ND"])
    factors = torch.linspace(-1, 2, 4)
    (weights(**alone) * factors).sum().backward()
    (weights(**among) * factors).sum().backward()
    assert_near(alone["x_ND"].grad, among["x_ND"].grad[3:4], 1e-6, "x")


def test_no_rows():
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(8))
    given = leaves(changed(arguments, x_ND=arguments["x_ND"][:0]), TRAINED)
    out = router(**given)
    (out[1].sum() + out[2].sum()).backward()
    assert given["x_ND"].grad.shape == (0, 64)
    for name in TRAINED[1:]:
        assert_same_bits(given[name].grad, torch.zeros_like(given[name]), name)
