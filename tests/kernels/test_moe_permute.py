"""moe_permute against a loop over the experts."""

import pytest
import torch

from suzuri.kernels.moe_permute import Permutation, cases, moe_permute
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    check_gradients,
    device_cases,
    each_dtype,
    generator,
)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_rows_sorted_by_expert_and_token(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    experts = arguments["experts_NJ"].tolist()
    num_experts, slots = arguments["num_experts"], len(experts[0])
    order: list[int] = []
    offsets = [0]
    for expert in range(num_experts):
        for token, chosen in enumerate(experts):
            order += [token * slots + j for j, e in enumerate(chosen) if e == expert]
        offsets.append(len(order))
    assert (offsets[1], offsets[-2]) == (0, len(order))  # unused experts at both ends
    rows_MD, permutation = moe_permute(**arguments)
    assert isinstance(permutation, Permutation)
    assert permutation.order_M.tolist() == order
    assert permutation.offsets_E1.tolist() == offsets
    assert permutation.inverse_M.tolist() == [order.index(i) for i in range(len(order))]
    tokens = torch.tensor(order, device=device) // slots
    assert_same_bits(rows_MD, arguments["x_ND"][tokens])


def test_all_tokens_at_the_last_expert(device: str):
    x = torch.arange(3.0, device=device)[:, None]
    experts = torch.full((3, 1), 4, device=device)
    rows_MD, permutation = moe_permute(x, experts, num_experts=5)
    assert_same_bits(rows_MD, x)
    assert permutation.offsets_E1.tolist() == [0, 0, 0, 0, 0, 3]


def test_no_tokens(device: str):
    x, experts = torch.zeros(0, 4, device=device), torch.zeros(0, 2, dtype=torch.int64)
    rows_MD, permutation = moe_permute(x, experts.to(device), num_experts=3)
    assert rows_MD.shape == (0, 4)
    assert permutation.offsets_E1.tolist() == [0, 0, 0, 0]


@each_dtype
def test_the_gradient_adds_the_slots_in_order(device: str, dtype: torch.dtype):
    """In at least fp32 and rounded once: the library's sum has an order of its own."""
    g = generator(2, device)
    x = torch.randn(70, 129, generator=g, device=device).to(dtype).requires_grad_()
    experts = torch.rand(70, 50, generator=g, device=device).argsort(-1)[:, :8].sort(-1).values
    rows_MD, permutation = moe_permute(x, experts, num_experts=50)
    grad_MD = torch.randn(rows_MD.shape, generator=g, device=device).to(dtype)
    rows_MD.backward(grad_MD)
    by_slot = grad_MD[permutation.inverse_M].unflatten(0, (70, 8))
    total = by_slot[:, 0].to(torch.promote_types(dtype, torch.float32))
    for slot in range(1, 8):
        total = total + by_slot[:, slot]
    assert x.grad is not None
    assert_same_bits(x.grad, total.to(dtype))


def test_gradient_is_that_of_finite_differences():
    arguments: Arguments = cases.build("odd", torch.float64, generator(3))
    arguments["x_ND"] = arguments["x_ND"][:, :2]
    check_gradients(lambda **rest: moe_permute(**rest)[0], arguments, ["x_ND"])
