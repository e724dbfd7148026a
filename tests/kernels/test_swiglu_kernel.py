"""swiglu's kernel: one rounding of the fp64 value, give or take the GPU's exp."""

import pytest
import torch

from suzuri.kernels.swiglu import cases, swiglu
from tests.kernels.compare import assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.swiglu import kernel

NOISE = 2.0**-17
"""Relative, fp32: exp of -110 alone is this far off, its argument being rounded."""


def exact(gate_up_NF2: torch.Tensor) -> torch.Tensor:
    wide = gate_up_NF2.double()
    gate, up = wide[..., 0::2], wide[..., 1::2]
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_formula_in_every_block(device: str, case: str, dtype: torch.dtype):
    x: torch.Tensor = cases.build(case, dtype, generator(1, device))["gate_up_NF2"]
    with nan_filled():
        wide = kernel.swiglu(x, torch.float32)
    expected = exact(x)
    tiny = torch.full_like(expected, 1e-36)
    assert_close(wide, expected, ulps=4, noise=NOISE, magnitude=expected.abs() + tiny)
    for block in (16, 64):
        with nan_filled():
            assert_same_bits(kernel.swiglu(x, torch.float32, block), wide, f"blocks of {block}")
    if device == "cuda":  # the interpreter cuts off instead of rounding to bf16
        assert_same_bits(kernel.swiglu(x, torch.bfloat16), wide.bfloat16())


@in_interpreter
def test_more_dims_strides_and_no_rows():
    x = torch.randn(2, 3, 10, generator=generator(2))
    flat = kernel.swiglu(x.flatten(0, 1), torch.float32)
    assert_same_bits(kernel.swiglu(x, torch.float32).flatten(0, 1), flat)
    assert_same_bits(kernel.swiglu(x[0].T.contiguous().T, torch.float32), flat[:3])
    assert kernel.swiglu(x[:0], torch.bfloat16).shape == (0, 3, 5)


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others():
    x: torch.Tensor = cases.build("inkling_expert", torch.float32, generator(3, "cuda"))[
        "gate_up_NF2"
    ]
    whole = swiglu(x, out_dtype=torch.bfloat16)
    for n in range(1, 64):
        assert_same_bits(swiglu(x[:n], out_dtype=torch.bfloat16), whole[:n], f"{n} rows")
