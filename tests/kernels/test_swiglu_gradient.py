"""swiglu's backward against the reference's."""

import pytest
import torch

from suzuri.kernels.swiglu import cases, swiglu
from tests.kernels.backward import (
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import Arguments, assert_same_bits, each_low_dtype, generator, threads

NAMES = ("gate_up_NF2",)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    check_backward(swiglu, arguments | {"out_dtype": dtype}, NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["odd"]))
def test_a_narrower_output_and_leading_dims(device: str, case: str, dtype: torch.dtype):
    x = cases.build(case, dtype, generator(2, device))["gate_up_NF2"][None].expand(2, -1, -1)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.bfloat16
    check_backward(swiglu, {"gate_up_NF2": x, "out_dtype": out_dtype}, NAMES)


def test_finite_differences():
    x = 2 * torch.randn(3, 6, generator=generator(3), dtype=torch.float64)
    check_finite_differences(swiglu, {"gate_up_NF2": x, "out_dtype": torch.float64}, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    x = torch.zeros(0, 8, dtype=dtype)
    check_no_rows(swiglu, {"gate_up_NF2": x, "out_dtype": dtype}, NAMES)


@each_low_dtype
def test_gates_far_out(dtype: torch.dtype):
    """No NaN where exp overflows: silu is 0 and flat on one side, the gate itself on the other."""
    x = torch.tensor([[-3e38, 2.0, -200.0, 3.0, 200.0, 4.0]]).to(dtype).requires_grad_()
    swiglu(x, out_dtype=torch.float32).sum().backward()
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 4.0, 200.0]]).to(dtype)
    assert_same_bits(grad_of(x) + 0.0, expected)


def test_threads_change_no_bit():
    x = torch.randn(900, 500, generator=generator(5))
    found = []
    for count in (1, 2):
        with threads(count):
            arguments: Arguments = {"gate_up_NF2": x, "out_dtype": torch.float32}
            found.append(backward(swiglu, arguments, NAMES)[1]["gate_up_NF2"])
    assert_same_bits(found[0], found[1])
