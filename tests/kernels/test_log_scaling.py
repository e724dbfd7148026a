"""log_scaling against the formula in Python's own math."""

import math

import pytest
import torch
from torch import Tensor

from suzuri.kernels.log_scaling import cases, log_scaling
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
)


def taus(positions_N: Tensor, n_floor: float, alpha: float) -> Tensor:
    values = [1 + alpha * math.log(max((p + 1) / n_floor, 1)) for p in positions_N.tolist()]
    return torch.tensor(values, dtype=torch.float64, device=positions_N.device)


@each_dtype
@pytest.mark.parametrize(("n_floor", "alpha"), [(8, 0.1), (12, 1.7), (131072, 0.1)])
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_formula(
    device: str, case: str, n_floor: float, alpha: float, dtype: torch.dtype
):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y_NHC = log_scaling(**arguments, n_floor=n_floor, alpha=alpha)
    assert y_NHC.dtype == dtype
    tau_N = taus(arguments["positions_N"], n_floor, alpha)
    expected = arguments["x_NHC"].double() * tau_N[:, None, None]
    assert_close(y_NHC, expected, ulps=3 if dtype == torch.float32 else ONE_ROUNDING)


@each_dtype
def test_exactly_one_up_to_the_floor_and_more_after_it(device: str, dtype: torch.dtype):
    x = torch.randn(5, 2, 3, generator=generator(2, device), device=device).to(dtype)
    positions = torch.tensor([0, 1, 10, 11, 12], device=device)
    y_NHC = log_scaling(x, positions, n_floor=12, alpha=3.0)
    assert_same_bits(y_NHC[:4], x[:4])
    assert (y_NHC[4].abs() > x[4].abs()).all()


def test_known_values(device: str):
    """tau at the ends of a 256k and a 1M context (docs/architecture.md 2.4)."""
    x = torch.ones(2, 1, 1, device=device)
    positions = torch.tensor([2**18 - 1, 2**20 - 1], device=device)
    tau = log_scaling(x, positions, n_floor=131072, alpha=0.1).flatten().tolist()
    assert tau == pytest.approx([1.0693147, 1.2079442], abs=2e-7)


def test_gradient_is_that_of_finite_differences():
    arguments: Arguments = cases.build("odd", torch.float64, generator(3))
    arguments |= {"n_floor": 3, "alpha": 0.7}
    check_gradients(log_scaling, arguments, ["x_NHC"])


@each_low_dtype
def test_gradient_in_the_dtype_of_x(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4, device))
    arguments |= {"n_floor": 3, "alpha": 0.7}
    check_low_precision_gradients(log_scaling, arguments, ["x_NHC"])
