"""matmul against plain fp64 products."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.matmul import cases, matmul
from tests.kernels.compare import (
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


def plain(x_NK: Tensor, weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The fp64 product and the size of its terms."""
    x, w = x_NK.double(), weight_MK.double()
    return x @ w.T, x.abs() @ w.abs().T


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_exact_product(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y_NM = matmul(**arguments)
    assert y_NM.dtype == dtype
    expected, magnitude = plain(**arguments)
    assert_close(y_NM, expected, magnitude=magnitude)


@each_dtype
def test_scale_multiplies_the_accumulator_before_the_rounding(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(2, device))
    expected, magnitude = plain(**arguments)
    scaled = matmul(**arguments, scale=1 / 24)
    # In fp32 the constant, the accumulator and the product round; bf16 shows one rounding.
    ulps = 2.5 if dtype == torch.float32 else 0.502
    assert_close(scaled, expected / 24, ulps=ulps, magnitude=magnitude)


def test_out_dtype_gives_the_unrounded_accumulator(device: str):
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(3, device))
    expected, magnitude = plain(**arguments)
    y_NM = matmul(**arguments, out_dtype=torch.float32)
    assert y_NM.dtype == torch.float32
    assert_close(y_NM, expected, magnitude=magnitude)
    assert_same_bits(y_NM.to(torch.bfloat16), matmul(**arguments))
    assert_same_bits(y_NM, exact.accumulators(**_as_x_w(arguments)).to(torch.float32))
    # The head (exactness.md, rounding points): 1 / mup on fp32, h never rounded after it.
    logits = matmul(**arguments, scale=1 / 24, out_dtype=torch.float32)
    assert_close(logits, expected / 24, ulps=2.5, magnitude=magnitude)


def _as_x_w(arguments: Arguments) -> Arguments:
    return {"x": arguments["x_NK"], "w": arguments["weight_MK"]}


def test_strided_operands_give_the_bits_of_contiguous_ones(device: str):
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(4, device))
    x, w = arguments["x_NK"], arguments["weight_MK"]
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=device)
    wide[:, ::2] = x
    assert_same_bits(matmul(wide[:, ::2], w.T.contiguous().T), matmul(x, w))


def test_no_rows_and_no_columns(device: str):
    w = torch.ones(3, 4, device=device)
    assert matmul(w[:0], w).shape == (0, 3)
    assert matmul(w, w[:0]).shape == (3, 0)
    assert_same_bits(matmul(w[:, :0], w[:, :0]), torch.zeros(3, 3, device=device))


def test_gradients_are_those_of_finite_differences():
    x, w = torch.randn(2, 3, 5, generator=generator(5), dtype=torch.float64)
    check_gradients(
        lambda x_NK, weight_MK: matmul(x_NK, weight_MK, scale=0.3),
        {"x_NK": x, "weight_MK": w[:2]},
        ["x_NK", "weight_MK"],
    )


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(6, device))
    check_low_precision_gradients(matmul, arguments, ["x_NK", "weight_MK"])


@pytest.mark.parametrize(
    ("x", "w"),
    [((3, 4), (5, 6)), ((2, 3, 4), (5, 4)), ((3, 4), (2, 5, 4))],
    ids=["widths", "x of three dims", "weight of three dims"],
)
def test_shapes_that_do_not_fit_are_refused(x: tuple[int, ...], w: tuple[int, ...]):
    with pytest.raises(ValueError, match="matmul"):
        matmul(torch.zeros(x), torch.zeros(w))
