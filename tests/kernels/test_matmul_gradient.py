"""matmul's backward against the reference's, and its products on their own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels.matmul import cases, gradient, matmul
from tests.kernels.backward import (
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    each_low_dtype,
    generator,
    threads,
)

NAMES = ("x_NK", "weight_MK")


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(matmul, cases.build(case, dtype, generator(1, device)), NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["odd"]))
def test_scaled_accumulators(device: str, case: str, dtype: torch.dtype):
    """The gradient of an fp32 output is fp32: on a GPU it meets bf16 weights in two parts."""
    arguments: Arguments = cases.build(case, dtype, generator(2, device))

    def scaled(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return matmul(x_NK, weight_MK, scale=1 / 24, out_dtype=wide)

    check_backward(scaled, arguments, NAMES)


def test_finite_differences():
    x, w = torch.randn(2, 3, 5, generator=generator(3), dtype=torch.float64)
    check_finite_differences(
        lambda x_NK, weight_MK: matmul(x_NK, weight_MK, scale=0.3),
        {"x_NK": x, "weight_MK": w[:2]},
        NAMES,
    )


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4))
    check_no_rows(matmul, arguments | {"x_NK": arguments["x_NK"][:0]}, NAMES)


def test_the_gradient_of_a_bf16_weight_is_not_rounded_to_bf16():
    """Where the trainer asks for fp32; and a weight's old copy is not used after a step."""
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(5))
    grad = backward(matmul, arguments, NAMES)[1]["weight_MK"]
    assert grad.dtype == torch.float32
    assert (grad != grad.bfloat16().float()).any()
    weight = torch.nn.Parameter(arguments["weight_MK"])
    for _ in range(2):
        found = matmul(arguments["x_NK"], weight)
        assert_same_bits(found, matmul(arguments["x_NK"], weight.detach().clone()))
        found.sum().backward()
        with torch.no_grad():
            weight.sub_(grad_of(weight))


def test_threads_change_no_bit_of_the_output():
    arguments: Arguments = cases.build("odd", torch.float32, generator(6))
    found: list[Tensor] = []
    for count in (1, 2):
        with threads(count):
            found.append(backward(matmul, arguments, NAMES)[0])
    assert_same_bits(found[0], found[1])


def test_what_is_saved_is_what_is_needed():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(7))
    x, weight = arguments["x_NK"], arguments["weight_MK"]
    for_weight: Any = matmul(x, weight.clone().requires_grad_()).grad_fn
    for_x: Any = matmul(x.clone().requires_grad_(), weight).grad_fn
    assert [saved is None for saved in for_weight.saved_tensors] == [False, True]
    assert [saved is None for saved in for_x.saved_tensors] == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_on_the_tensor_cores(dtype: torch.dtype):
    """An fp32 operand keeps 16 of its bits beside a bf16 one; a bf16 one is exact."""
    g = generator(8, "cuda")
    a = torch.randn(300, 520, generator=g, device="cuda").to(dtype)
    b = torch.randn(520, 136, generator=g, device="cuda").bfloat16()
    found, exact = gradient.product(a, b), a.double() @ b.double()
    assert found.dtype == torch.float32
    assert (found - exact).norm() < (2e-5 if dtype == torch.float32 else 1e-6) * exact.norm()
    assert_same_bits(found, gradient.product(a, b))
