"""rms_norm's backward against the reference's."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.rms_norm import cases, rms_norm
from tests.kernels.backward import (
    assert_near,
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
    widened,
)

NAMES = ("x_ND", "weight_D")
WIDE = [name for name in cases.SHAPES if name != "one"]


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(WIDE))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    check_backward(rms_norm, arguments | {"eps": 1e-6}, NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["head"]))
def test_heads_unrounded_with_a_wider_weight(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    wide = torch.promote_types(dtype, torch.float32)
    weight = arguments["weight_D"].to(wide)
    arguments = {"x_ND": arguments["x_ND"].unflatten(0, (6, 4)), "weight_D": weight}
    check_backward(rms_norm, arguments | {"eps": 1e-2, "out_dtype": wide}, NAMES)


@each_low_dtype
def test_rows_of_one_number_hardly_change(dtype: torch.dtype):
    """y is then near the sign of x: what is left of the gradient is smaller than its terms."""
    arguments: Arguments = cases.build("one", dtype, generator(9)) | {"eps": 1e-6}
    grad = backward(rms_norm, arguments, NAMES)[1]["x_ND"]
    exact = backward(rms_norm, widened(arguments), NAMES)[1]["x_ND"]
    size = (arguments["weight_D"] / arguments["x_ND"]).abs().double()
    assert ((grad - exact).abs() <= 1e-6 * size + 4e-3 * exact.abs()).all()


def test_finite_differences():
    x, w = torch.randn(2, 3, 5, generator=generator(3), dtype=torch.float64)
    check_finite_differences(rms_norm, {"x_ND": x, "weight_D": w[0], "eps": 1e-3}, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4)) | {"eps": 1e-6}
    check_no_rows(rms_norm, arguments | {"x_ND": arguments["x_ND"][:0]}, NAMES)


@each_low_dtype
def test_rows_longer_than_a_fold(dtype: torch.dtype):
    """Beyond exact.FOLD the forward is the reference's; the backward need not be."""
    x = torch.randn(3, 4099, generator=generator(5)).to(dtype)
    check_backward(rms_norm, {"x_ND": x, "weight_D": x[0], "eps": 1e-6}, NAMES)


def test_threads_and_neighbours():
    """Many rows are shared out to threads: the same bits. A row's gradient is its own alone, and
    that of the weight changes by rounding only when the rows come in another order."""
    x = torch.randn(7001, 60, generator=generator(6))
    arguments: Arguments = {"x_ND": x, "weight_D": x[0], "eps": 1e-6}
    found: list[dict[str, Tensor]] = []
    for count in (1, 2):
        with threads(count):
            found.append(backward(rms_norm, arguments, NAMES)[1])
    for name in NAMES:
        assert_same_bits(found[0][name], found[1][name], name)
    order = torch.randperm(7001, generator=generator(7))
    grad = torch.randn(7001, 60, generator=generator(8))
    grads: list[list[Tensor]] = []
    for rows in (torch.arange(7001), order):
        leaves = [x[rows].requires_grad_(), x[0].clone().requires_grad_()]
        rms_norm(leaves[0], leaves[1], 1e-6).backward(grad[rows])
        grads.append(list(map(grad_of, leaves)))
    assert not dispatch.is_forced()
    assert_same_bits(grads[1][0], grads[0][0][order])
    assert_near(grads[1][1], grads[0][1], 1e-6, "weight")
