"""random_normal's kernel: the numbers of the reference, bit for bit."""

import pytest
import torch

from suzuri.kernels.random_normal import cases, random_normal, reference
from tests.kernels.compare import assert_same_bits
from tests.kernels.on_triton import IS_INTERPRETED, in_interpreter, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.random_normal import kernel

DEVICES = [
    *(pytest.param("cpu", name, marks=in_interpreter) for name in cases.SHAPES if name != "large"),
    *(pytest.param("cuda", name, marks=on_gpu) for name in cases.SHAPES),
]


@pytest.mark.parametrize(("device", "case"), DEVICES)
def test_numbers_of_the_reference(device: str, case: str):
    given = cases.build(case)
    key = torch.tensor(given.pop("seed"), device=device)
    with nan_filled():
        found = kernel.random_normal(key, **given)
    assert_same_bits(found, reference.random_normal(key, **given))


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)
def test_any_cut_of_the_range_gives_the_same(device: str):
    key = torch.tensor(11, device=device)
    whole = kernel.random_normal(key, 3, 0, 3000)
    for first, count in ((0, 1), (1, 7), (7, 2), (13, 2500), (2047, 3), (2999, 1)):
        part = kernel.random_normal(key, 3, first, count)
        assert_same_bits(part, whole[first : first + count], f"{first}, {count}")


@on_gpu
def test_the_op_runs_the_kernel():
    assert not IS_INTERPRETED
    found = random_normal(5, 6, 2**40 + 3, 64, device="cuda")
    assert_same_bits(found.cpu(), random_normal(5, 6, 2**40 + 3, 64))
