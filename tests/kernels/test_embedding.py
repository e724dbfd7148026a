"""embedding against a loop over the ids; its gradient against torch.nn.functional."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.embedding import cases, embedding
from tests.kernels.compare import (
    Arguments,
    assert_close,
    assert_same_bits,
    check_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    widened,
)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_selects_the_bits_of_the_rows(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    out_ND = embedding(**arguments)
    for row, index in enumerate(arguments["ids_N"].tolist()):
        assert_same_bits(out_ND[row], arguments["weight_VD"][index])


def test_gradient_is_that_of_finite_differences():
    arguments: Arguments = cases.build("repeated", torch.float64, generator(2))
    arguments["weight_VD"] = arguments["weight_VD"][:, :3]
    check_gradients(embedding, arguments, ["weight_VD"])


@each_low_dtype
def test_gradient_is_the_sum_rounded_once(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("repeated", dtype, generator(3, device))
    ids, weight = arguments["ids_N"], arguments["weight_VD"]
    assert ids.bincount().max() > 8
    grad_ND = torch.randn(
        *ids.shape, weight.shape[1], generator=generator(4, device), device=device
    )
    grad_ND = grad_ND.to(dtype)
    weight = weight.clone().requires_grad_()
    embedding(ids, weight).backward(grad_ND)
    expected = torch.zeros(weight.shape, dtype=torch.float64, device=device)
    size = torch.zeros_like(expected)
    for row, index in enumerate(ids.tolist()):
        expected[index] += grad_ND[row].double()
        size[index] += grad_ND[row].double().abs()
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    assert_close(weight.grad, expected, magnitude=size, noise=6 * 2.0**-24)


def test_gradient_agrees_with_the_library_and_is_zero_where_no_id_points(device: str):
    def library(ids_N: Tensor, weight_VD: Tensor) -> Tensor:
        return functional.embedding(ids_N, weight_VD)

    arguments = widened(cases.build("tiny", torch.float32, generator(5, device)))
    (ours,) = gradients(embedding, arguments, ["weight_VD"])
    (theirs,) = gradients(library, arguments, ["weight_VD"])
    assert_close(ours, theirs, magnitude=torch.full_like(theirs, 10.0))
    unused = torch.ones(len(ours), dtype=torch.bool, device=device)
    unused[arguments["ids_N"]] = False
    assert unused.any()
    assert not ours[unused].any()


@pytest.mark.parametrize("wrong", [-1, 40])
def test_ids_outside_the_table_are_refused(wrong: int):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(6))
    arguments["ids_N"][3] = wrong
    with pytest.raises(IndexError):
        embedding(**arguments)


def test_no_tokens():
    weight = torch.ones(4, 3, requires_grad=True)
    out_ND = embedding(torch.zeros(0, dtype=torch.int64), weight)
    out_ND.sum().backward()
    assert out_ND.shape == (0, 3)
    assert weight.grad is not None
    assert_same_bits(weight.grad, torch.zeros(4, 3))
