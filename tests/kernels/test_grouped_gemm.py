"""grouped_gemm against one plain fp64 product per expert."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from suzuri.kernels.grouped_gemm import cases, grouped_gemm
from suzuri.kernels.matmul import matmul
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
    gradients,
)


def plain(x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor) -> Tensor:
    ends = offsets_E1.tolist()
    owner = [e for e, (a, b) in enumerate(pairwise(ends)) for _ in range(b - a)]
    return torch.stack([weight_EFK[e] @ x for e, x in zip(owner, x_MK, strict=True)])


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_exact_product(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    x, weight = arguments["x_MK"].double(), arguments["weight_EFK"].double()
    expected = plain(x, weight, arguments["offsets_E1"])
    size = plain(x.abs(), weight.abs(), arguments["offsets_E1"])
    out_MF = grouped_gemm(**arguments, out_dtype=dtype)
    assert_close(out_MF, expected, magnitude=size)
    if dtype == torch.bfloat16:
        unrounded = grouped_gemm(**arguments, out_dtype=torch.float32)
        assert_close(unrounded, expected, magnitude=size)


def test_each_expert_has_the_bits_of_its_own_matmul(device: str):
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(2, device))
    out_MF = grouped_gemm(**arguments, out_dtype=torch.bfloat16)
    for expert, (begin, end) in enumerate(pairwise(arguments["offsets_E1"].tolist())):
        alone = matmul(arguments["x_MK"][begin:end], arguments["weight_EFK"][expert])
        assert_same_bits(out_MF[begin:end], alone)


def test_no_rows_at_all(device: str):
    weight = torch.ones(3, 5, 4, device=device)
    offsets = torch.zeros(4, dtype=torch.int64, device=device)
    out_MF = grouped_gemm(weight[0, :0], weight, offsets, out_dtype=torch.bfloat16)
    assert (out_MF.shape, out_MF.dtype) == ((0, 5), torch.bfloat16)


def test_gradients_are_those_of_finite_differences_and_zero_for_idle_experts():
    g = generator(3)
    arguments: Arguments = {
        "x_MK": torch.randn(4, 3, generator=g, dtype=torch.float64),
        "weight_EFK": torch.randn(4, 2, 3, generator=g, dtype=torch.float64),
        "offsets_E1": torch.tensor([0, 0, 3, 3, 4]),
        "out_dtype": torch.float64,
    }
    names = ["x_MK", "weight_EFK"]
    check_gradients(grouped_gemm, arguments, names)
    grad_x, grad_weight = gradients(grouped_gemm, arguments, names)
    assert grad_x.abs().min() > 0
    assert [bool(grad_weight[e].any()) for e in range(4)] == [False, True, False, True]


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4, device)) | {"out_dtype": dtype}
    check_low_precision_gradients(grouped_gemm, arguments, ["x_MK", "weight_EFK"])


@pytest.mark.parametrize("what", ["width", "offsets"])
def test_shapes_that_do_not_fit_are_refused(what: str):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(5))
    if what == "width":
        arguments["x_MK"] = arguments["x_MK"][:, :-1]
    else:
        arguments["offsets_E1"] = arguments["offsets_E1"][:-1]
    with pytest.raises(ValueError, match="grouped_gemm"):
        grouped_gemm(**arguments, out_dtype=torch.float32)
