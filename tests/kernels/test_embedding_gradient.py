"""embedding's backward: the rows of an id added, against the reference's and plain sums."""

import pytest
import torch

from suzuri.kernels.embedding import cases, embedding, gradient
from tests.kernels.backward import (
    assert_near,
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import Arguments, assert_same_bits, each_low_dtype, generator

NAMES = ("weight_VD",)
SMALL_CASES = [name for name in cases.SHAPES if name != "inkling"]
"""The gradient of the largest table alone takes 5 GB."""


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(SMALL_CASES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(embedding, cases.build(case, dtype, generator(1, device)), NAMES)


def test_finite_differences():
    arguments: Arguments = cases.build("repeated", torch.float64, generator(2))
    few = {"ids_N": arguments["ids_N"][:7], "weight_VD": arguments["weight_VD"][:, :2]}
    check_finite_differences(embedding, few, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(3))
    check_no_rows(embedding, arguments | {"ids_N": arguments["ids_N"][:0]}, NAMES)


@each_low_dtype
def test_rows_beyond_the_table_are_padding(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4)) | {"num_rows": 40}
    table = arguments["weight_VD"]
    padded = torch.cat([table, torch.full((3, table.shape[1]), torch.nan).to(dtype)])
    out, found = backward(embedding, arguments | {"weight_VD": padded}, NAMES)
    plain, expected = backward(embedding, arguments, NAMES)
    assert_same_bits(out, plain)
    assert_same_bits(found["weight_VD"][:40], expected["weight_VD"])
    assert not found["weight_VD"][40:].any()
    with pytest.raises(IndexError, match=r"id 40 is not in \[0, 40\)"):
        embedding(torch.tensor([3, 40]), padded.requires_grad_(), num_rows=40)


def test_an_id_with_thousands_of_rows():
    """In whatever order they come: rounding only."""
    ids = torch.randint(2, (9000,), generator=generator(5))
    grad = torch.randn(9000, 8, generator=generator(6))
    order = torch.randperm(9000, generator=generator(7))
    exact = torch.stack([grad[ids == i].double().sum(0) for i in range(2)])
    for rows in (slice(None), order):
        weight = torch.zeros(2, 8, requires_grad=True)
        embedding(ids[rows], weight).backward(grad[rows])
        assert_near(grad_of(weight), exact, 1e-7, "loops")
        assert_near(gradient.add_rows(grad[rows], ids[rows], 2), exact, 1e-6, "scan")


def test_ids_that_are_not_in_the_table_add_nothing():
    """On a GPU, where their output is NaN; the other rows stay as they are."""
    ids = torch.tensor([2, -1, 7, 0, 2, 2**40])
    grad = torch.ones(6, 3)
    grad[[1, 2, 5]] = torch.nan
    expected = torch.tensor([1.0, 0.0, 2.0]).repeat(3, 1).T
    assert_same_bits(gradient.add_rows(grad, ids, 3), expected.contiguous())
