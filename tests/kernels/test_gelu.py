"""gelu against torch.nn.functional.gelu in fp64."""

import pytest
import torch
from torch.nn import functional

from suzuri.kernels.gelu import cases, gelu
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
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
)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_formula(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y = gelu(**arguments)
    assert y.dtype == dtype
    x = arguments["x"].double()
    # 1 + erf cancels on the left: the error there is one of erf, relative to x.
    noise = FP64_NOISE if dtype == torch.float64 else 3 * FP32_EPS
    assert_close(y, functional.gelu(x), magnitude=x.abs(), noise=noise)


def test_the_erf_form_and_not_the_tanh_form(device: str):
    x = torch.linspace(-3, 3, 41, device=device)
    tanh_form = functional.gelu(x.double(), approximate="tanh")
    with pytest.raises(AssertionError):
        assert_close(gelu(x), tanh_form, magnitude=x.double().abs(), noise=3 * FP32_EPS)


def test_extremes_and_any_shape(device: str):
    x = torch.tensor([[-1e30, -60.0], [-0.0, 0.0], [60.0, 1e30]], device=device)
    expected = torch.tensor([[-0.0, -0.0], [-0.0, 0.0], [60.0, 1e30]], device=device)
    assert_same_bits(gelu(x), expected)
    assert_same_bits(gelu(x[0, 1]), expected[0, 1])


def test_gradient_is_that_of_finite_differences():
    check_gradients(gelu, {"x": torch.linspace(-4, 4, 11, dtype=torch.float64)}, ["x"])


def test_gradient_far_out_is_that_of_the_library(device: str):
    x = torch.tensor([-1e4, -60.0, -5.0, 0.0, 5.0, 60.0, 1e4], device=device)
    ours = gradients(gelu, {"x": x}, ["x"])[0]
    theirs = gradients(functional.gelu, {"x": x.double()}, ["x"])[0]
    assert_close(ours, theirs, ulps=4, noise=8 * FP32_EPS, magnitude=torch.ones_like(theirs))


@each_low_dtype
def test_gradient_in_the_dtype_of_x(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(2, device))
    check_low_precision_gradients(gelu, arguments, ["x"])
