"""gelu's backward against the reference's."""

import pytest
import torch

from suzuri.kernels.gelu import cases, gelu
from tests.kernels.backward import (
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import assert_same_bits, each_low_dtype, generator


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(gelu, cases.build(case, dtype, generator(1, device)), ["x"])


def test_finite_differences():
    x = 2 * torch.randn(3, 5, generator=generator(2), dtype=torch.float64)
    check_finite_differences(gelu, {"x": x}, ["x"])


@each_low_dtype
def test_no_rows_and_values_far_out(dtype: torch.dtype):
    check_no_rows(gelu, {"x": torch.zeros(0, 5, dtype=dtype)}, ["x"])
    x = torch.tensor([-1e30, -60.0, 0.0, 60.0, 1e30]).to(dtype).requires_grad_()
    gelu(x).sum().backward()
    assert_same_bits(grad_of(x) + 0.0, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]).to(dtype))
