"""swiglu against torch.nn.functional.silu in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.swiglu import cases, swiglu
from tests.kernels.compare import (
    ONE_ROUNDING,
    Arguments,
    assert_close,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
)


def plain(gate_up_NF2: Tensor, out_dtype: torch.dtype = torch.float64) -> Tensor:
    gate, up = gate_up_NF2.unflatten(-1, (-1, 2)).unbind(-1)
    return (functional.silu(gate) * up).to(out_dtype)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_formula(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    hidden_NF = swiglu(**arguments, out_dtype=dtype)
    expected = plain(arguments["gate_up_NF2"].double())
    assert_close(hidden_NF, expected, ulps=4 if dtype == torch.float32 else ONE_ROUNDING)


def test_accumulators_are_rounded_once(device: str):
    """The expert's rule: fp32 gate and up, silu * up in fp32, one rounding to bf16."""
    arguments: Arguments = cases.build("tiny", torch.float32, generator(2, device))
    hidden_NF = swiglu(**arguments, out_dtype=torch.bfloat16)
    assert hidden_NF.dtype == torch.bfloat16
    assert_close(hidden_NF, plain(arguments["gate_up_NF2"].double()))


def test_even_columns_gate_and_odd_columns_multiply(device: str):
    x = torch.tensor([[0.0, 5.0, 2.0, 0.0, 40.0, 3.0]], device=device)
    assert swiglu(x, out_dtype=torch.float32).tolist() == [[0.0, 0.0, 120.0]]


def test_gradient_is_that_of_finite_differences():
    x = 2 * torch.randn(3, 6, generator=generator(3), dtype=torch.float64)
    arguments: Arguments = {"gate_up_NF2": x, "out_dtype": torch.float64}
    check_gradients(swiglu, arguments, ["gate_up_NF2"])


def test_gradient_far_out_is_finite_and_that_of_the_library(device: str):
    """Below -88 the fp32 exp(-g) is inf: a derivative taken through it would be NaN."""
    gates = torch.tensor([-1e4, -110.0, -89.0, -88.0, -30.0, 30.0, 110.0, 1e4], device=device)
    x = torch.stack([gates, torch.full_like(gates, 2.0)], 1)
    arguments: Arguments = {"gate_up_NF2": x, "out_dtype": torch.float32}
    ours = gradients(swiglu, arguments, ["gate_up_NF2"])[0]
    wide: Arguments = {"gate_up_NF2": x.double()}
    theirs = gradients(plain, wide, ["gate_up_NF2"])[0]
    # exp(-g) = inf makes 0 of values below 1e-36.
    assert_close(ours, theirs, ulps=16, noise=1e-36, magnitude=torch.ones_like(theirs))


@each_low_dtype
def test_gradient_in_the_dtype_of_the_input(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(4, device)) | {"out_dtype": dtype}
    check_low_precision_gradients(swiglu, arguments, ["gate_up_NF2"])


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match="even"):
        swiglu(torch.zeros(3, 5), out_dtype=torch.float32)
