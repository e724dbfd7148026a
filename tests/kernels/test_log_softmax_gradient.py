"""log_softmax's own backward."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.log_softmax import cases, log_softmax
from tests.kernels.backward import (
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
)
from tests.kernels.compare import generator


def finite(logits_NV: Tensor) -> Tensor:
    return log_softmax(logits_NV).masked_fill(logits_NV == -torch.inf, 0.0)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype):
    """One id is masked: its log-prob is -inf, and no gradient comes in there."""
    check_backward(finite, cases.build(case, dtype, generator(1, device)), ["logits_NV"])


def test_finite_differences():
    logits = torch.randn(2, 7, generator=generator(2), dtype=torch.float64)
    check_finite_differences(log_softmax, {"logits_NV": logits}, ["logits_NV"])


def test_no_rows():
    check_no_rows(log_softmax, {"logits_NV": torch.zeros(0, 5)}, ["logits_NV"])
