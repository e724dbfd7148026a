"""kv_write against a loop over the rows."""

import pytest
import torch

from suzuri.kernels.kv_write import cases, kv_write
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    generator,
)


def written(arguments: Arguments) -> Arguments:
    """The pages as they must be afterwards, by a loop; the arguments stay as they are."""
    pages = {name: arguments[name].clone() for name in ("k_pages_PTUC", "v_pages_PTUC")}
    size = pages["k_pages_PTUC"].shape[1]
    for row, slot in enumerate(arguments["slots_N"].tolist()):
        if slot >= 0:
            pages["k_pages_PTUC"][slot // size, slot % size] = arguments["k_NUC"][row]
            pages["v_pages_PTUC"][slot // size, slot % size] = arguments["v_NUC"][row]
    return pages


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_rows_go_to_their_slots_and_nothing_else_changes(
    device: str, case: str, dtype: torch.dtype
):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    assert (arguments["slots_N"] < 0).sum() == 1
    expected = written(arguments)
    assert not torch.equal(expected["k_pages_PTUC"], arguments["k_pages_PTUC"])
    kv_write(**arguments)
    for name, pages in expected.items():
        assert_same_bits(arguments[name], pages, name)


def test_bits_pass_through_also_of_numbers_that_compare_oddly(device: str):
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(2, device))
    arguments["k_NUC"][0] = -0.0
    arguments["v_NUC"][0] = torch.inf
    arguments["v_NUC"][1] = torch.finfo(torch.bfloat16).smallest_normal / 4
    expected = written(arguments)
    kv_write(**arguments)
    for name, pages in expected.items():
        assert_same_bits(arguments[name], pages, name)


def test_pools_that_are_views(device: str):
    """Keys and values of a layer may be slices of one allocation."""
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(3, device))
    expected = written(arguments)
    pool = torch.stack([arguments["k_pages_PTUC"], arguments["v_pages_PTUC"]], 2)
    kv_write(**changed(arguments, k_pages_PTUC=pool[:, :, 0], v_pages_PTUC=pool[:, :, 1]))
    assert_same_bits(pool[:, :, 0], expected["k_pages_PTUC"])
    assert_same_bits(pool[:, :, 1], expected["v_pages_PTUC"])


def test_rows_that_require_gradients_are_written_all_the_same():
    arguments: Arguments = cases.build("odd", torch.float32, generator(4))
    expected = written(arguments)
    arguments["k_NUC"].requires_grad_()
    kv_write(**arguments)
    assert not arguments["k_pages_PTUC"].requires_grad
    assert_same_bits(arguments["k_pages_PTUC"], expected["k_pages_PTUC"])


def test_no_row_has_a_slot(device: str):
    arguments: Arguments = cases.build("odd", torch.float32, generator(5, device))
    before = arguments["k_pages_PTUC"].clone()
    kv_write(**changed(arguments, slots_N=torch.full_like(arguments["slots_N"], -1)))
    assert_same_bits(arguments["k_pages_PTUC"], before)


@pytest.mark.parametrize("name", ["k_NUC", "v_NUC"])
def test_rows_of_another_dtype_are_refused(name: str):
    arguments: Arguments = cases.build("odd", torch.float32, generator(6))
    arguments[name] = arguments[name].bfloat16()
    with pytest.raises(ValueError, match="kv_write"):
        kv_write(**arguments)
