"""embedding_sum against torch.nn.functional.embedding in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.embedding_sum import cases, embedding_sum
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
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
    widened,
)


def plain(ids_NB: Tensor, weight_VD: Tensor) -> Tensor:
    return functional.embedding(ids_NB, weight_VD).sum(1)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_unrounded_sum_of_the_rows(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    out_ND = embedding_sum(**arguments)
    assert out_ND.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    ids, weight = arguments["ids_NB"], arguments["weight_VD"].double()
    # A tree over B bins rounds log2(B) times.
    noise = FP64_NOISE if dtype == torch.float64 else 7 * FP32_EPS
    assert_close(out_ND, plain(ids, weight), magnitude=plain(ids, weight.abs()), noise=noise)


def test_one_bin_is_the_row_itself(device: str):
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(2, device))
    ids, weight = arguments["ids_NB"][:, :1], arguments["weight_VD"]
    assert_same_bits(embedding_sum(ids, weight), weight[ids[:, 0]].float())


def test_gradient_is_that_of_finite_differences():
    arguments = widened(cases.build("odd", torch.float32, generator(3)))
    arguments["weight_VD"] = arguments["weight_VD"][:, :3]
    check_gradients(embedding_sum, arguments, ["weight_VD"])


def test_gradient_agrees_with_the_library_also_for_repeated_ids(device: str):
    arguments = widened(cases.build("tiny", torch.float32, generator(4, device)))
    arguments["ids_NB"] = arguments["ids_NB"] % 5
    ours = gradients(embedding_sum, arguments, ["weight_VD"])[0]
    theirs = gradients(plain, arguments, ["weight_VD"])[0]
    assert_close(ours, theirs, magnitude=torch.full_like(theirs, 50.0))


@each_low_dtype
def test_gradient_in_the_dtype_of_the_weight(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(5, device))
    check_low_precision_gradients(embedding_sum, arguments, ["weight_VD"])
