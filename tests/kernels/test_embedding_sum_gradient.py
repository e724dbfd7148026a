"""embedding_sum's backward against the reference's."""

import pytest
import torch

from suzuri.kernels.embedding_sum import cases, embedding_sum, gradient
from tests.kernels.backward import (
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import Arguments, assert_same_bits, each_low_dtype, generator

NAMES = ("weight_VD",)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(embedding_sum, cases.build(case, dtype, generator(1, device)), NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["tiny"]))
def test_rows_that_repeat_an_id(
    device: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Also over more rows than one table of counts holds."""
    monkeypatch.setattr(gradient, "ROWS", 4)
    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    check_backward(embedding_sum, arguments | {"ids_NB": arguments["ids_NB"] % 5}, NAMES)


def test_finite_differences():
    ids = torch.tensor([[0, 2, 2], [1, 2, 0], [0, 0, 0]])
    weight = torch.randn(4, 2, generator=generator(3), dtype=torch.float64)
    check_finite_differences(embedding_sum, {"ids_NB": ids, "weight_VD": weight}, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4))
    check_no_rows(embedding_sum, arguments | {"ids_NB": arguments["ids_NB"][:0]}, NAMES)


@pytest.mark.gpu
def test_ids_that_are_not_in_the_table_add_nothing():
    """Only on a GPU do they come so far: the output of their rows is NaN there."""
    weight = torch.ones(3, 2, device="cuda", requires_grad=True)
    ids = torch.tensor([[0, 2], [-1, 7], [2, 2]], device="cuda")
    embedding_sum(ids, weight)[[0, 2]].sum().backward()
    expected = torch.tensor([1.0, 0.0, 3.0], device="cuda").repeat(2, 1).T
    assert_same_bits(grad_of(weight), expected.contiguous())
