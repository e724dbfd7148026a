"""log_scaling's backward against the reference's."""

import pytest
import torch

from suzuri.kernels.log_scaling import cases, log_scaling
from tests.kernels.backward import (
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
)
from tests.kernels.compare import Arguments, each_low_dtype, generator

NAMES = ("x_NHC",)
SCALES = {"n_floor": 10.0, "alpha": 0.1}


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(log_scaling, cases.build(case, dtype, generator(1, device)) | SCALES, NAMES)


def test_finite_differences():
    x = torch.randn(3, 2, 2, generator=generator(2), dtype=torch.float64)
    positions = torch.tensor([3, 9, 4000])
    check_finite_differences(log_scaling, {"x_NHC": x, "positions_N": positions} | SCALES, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(3)) | SCALES
    few = {name: arguments[name][:0] for name in ("x_NHC", "positions_N")}
    check_no_rows(log_scaling, arguments | few, NAMES)
