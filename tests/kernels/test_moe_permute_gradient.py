"""moe_permute's own backward: the slots of a row, added in order."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.moe_permute import cases, moe_permute
from tests.kernels.backward import (
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
)
from tests.kernels.compare import changed, generator, leaves


def rows(x_ND: Tensor, experts_NJ: Tensor, num_experts: int) -> Tensor:
    return moe_permute(x_ND, experts_NJ, num_experts=num_experts)[0]


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(rows, cases.build(case, dtype, generator(1, device)), ["x_ND"])


def test_finite_differences():
    check_finite_differences(rows, cases.build("odd", torch.float64, generator(2)), ["x_ND"])


def test_slots_are_added_in_fp32_in_slot_order():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    found = rows(x, torch.tensor([[2, 0, 1]]), 3)
    # Sorted: slots 1, 2, 0. In slot order: (2^30 + 1) - 2^30 is 0 in fp32, 1 in another order.
    found.backward(torch.tensor([[1.0], [-(2.0**30)], [2.0**30]]).bfloat16())
    assert x.grad is not None
    assert x.grad.item() == 0


def test_the_places_have_no_gradient_and_no_rows_give_none():
    arguments = leaves(cases.build("tiny", torch.float32, generator(3)), ["x_ND"])
    _, order = moe_permute(**arguments)
    assert not any(place.requires_grad for place in order)
    empty = {"x_ND": torch.zeros(0, 16), "experts_NJ": arguments["experts_NJ"][:0]}
    check_no_rows(rows, changed(arguments, **empty), ["x_ND"])
