"""rms_norm against torch.nn.functional.rms_norm in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.rms_norm import cases, rms_norm
from tests.kernels.compare import (
    ONE_ROUNDING,
    Arguments,
    assert_close,
    assert_same_bits,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    widened,
)

EPS = 1e-6


def plain(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x_ND, weight_D.shape, weight_D, eps)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_exact_norm(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y_ND = rms_norm(**arguments, eps=EPS)
    assert y_ND.dtype == dtype
    expected = plain(**widened(arguments), eps=EPS)
    # fp32: the tree, rsqrt and two products. bf16 shows the last rounding alone: the product with
    # the weight happens before it.
    assert_close(y_ND, expected, ulps=6 if dtype == torch.float32 else ONE_ROUNDING)


def test_the_weight_is_multiplied_before_the_rounding(device: str):
    """The other order (round, then multiply and round) is told apart by the bound used above."""
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(2, device))
    x, weight = arguments["x_ND"], arguments["weight_D"]
    normed = plain(x.double(), torch.ones_like(weight, dtype=torch.float64), EPS)
    twice = normed.bfloat16() * weight
    with pytest.raises(AssertionError):
        assert_close(twice, normed * weight.double())


def test_out_dtype_and_a_wider_weight(device: str):
    arguments: Arguments = cases.build("head", torch.bfloat16, generator(3, device))
    arguments["weight_D"] = arguments["weight_D"].float() * 1.001
    y_ND = rms_norm(**arguments, eps=EPS, out_dtype=torch.float32)
    assert y_ND.dtype == torch.float32
    assert_close(y_ND, plain(**widened(arguments), eps=EPS), ulps=6)


def test_eps_keeps_small_rows_small(device: str):
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-4, -2e-4, 0.0]], device=device)
    weight = torch.tensor([1.0, 2.0, 3.0], device=device)
    y_ND = rms_norm(x, weight, 1e-2)
    assert_same_bits(y_ND[0], torch.zeros(3, device=device))
    assert_close(y_ND, plain(x.double(), weight.double(), 1e-2), ulps=6)
    assert y_ND[1].abs().max() < 1e-2


def test_leading_dims_are_rows(device: str):
    arguments: Arguments = cases.build("head", torch.bfloat16, generator(4, device))
    x, weight = arguments["x_ND"], arguments["weight_D"]
    split = rms_norm(x.unflatten(0, (4, 6)), weight, EPS)
    assert_same_bits(split.flatten(0, 1), rms_norm(x, weight, EPS))


def test_gradients_are_those_of_finite_differences_and_of_the_library():
    g = generator(5)
    arguments: Arguments = {
        "x_ND": torch.randn(3, 5, generator=g, dtype=torch.float64),
        "weight_D": torch.randn(5, generator=g, dtype=torch.float64),
        "eps": 1e-3,
    }
    check_gradients(rms_norm, arguments, ["x_ND", "weight_D"])
    ours = gradients(rms_norm, arguments, ["x_ND", "weight_D"])
    theirs = gradients(plain, arguments, ["x_ND", "weight_D"])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, magnitude=torch.full_like(b, 10.0))


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(6, device)) | {"eps": EPS}
    check_low_precision_gradients(rms_norm, arguments, ["x_ND", "weight_D"])


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(3, 4), torch.zeros(5), EPS)
