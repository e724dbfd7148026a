"""moe_permute's kernel against the reference, element for element: it only moves."""

import pytest
import torch

from suzuri.kernels.moe_permute import cases, moe_permute, reference
from tests.kernels.compare import Arguments, assert_same_bits, generator
from tests.kernels.on_triton import LOW, in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.moe_permute import kernel

NAMES = ("rows", "order", "inverse", "offsets")


WAYS = {
    "as chosen": {},
    "at once": {"at_once": 1 << 20},
    "in blocks": {"at_once": 0},
    "by sort": {"at_once": 0, "in_blocks": 0},
}


def check(arguments: Arguments, way: str) -> None:
    expected = reference.moe_permute(**arguments)
    with nan_filled():
        found = kernel.moe_permute(**arguments, **WAYS[way])
    for name, actual, wanted in zip(NAMES, found, expected, strict=True):
        assert_same_bits(actual, wanted, name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES, dtypes=LOW))
def test_equal_to_the_reference(device: str, case: str, dtype: torch.dtype, way: str):
    check(cases.build(case, dtype, generator(1, device)), way)


@in_interpreter
def test_blocks_that_are_not_full():
    arguments: Arguments = {
        "x_ND": torch.randn(300, 3, generator=generator(3)),
        "experts_NJ": torch.randint(5, (300, 4), generator=generator(4)),
        "num_experts": 7,
    }
    check(arguments, "in blocks")
    check(arguments | {"num_experts": 8}, "in blocks")


@in_interpreter
def test_no_rows_and_strides():
    arguments: Arguments = cases.build("odd", torch.float32, generator(2))
    check(arguments | {"x_ND": arguments["x_ND"].T.contiguous().T}, "as chosen")
    empty = {"x_ND": torch.ones(0, 3), "experts_NJ": torch.ones(0, 2).long(), "num_experts": 4}
    check(empty, "as chosen")


@on_gpu
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 255, 256, 257, 3000, 20000])
@pytest.mark.parametrize("spread", [1, 258], ids=["one expert", "all experts"])
def test_places_are_equal_in_every_way(tokens: int, spread: int):
    g = generator(tokens, "cuda")
    arguments: Arguments = {
        "x_ND": torch.randn(tokens, 72, generator=g, device="cuda").bfloat16(),
        "experts_NJ": torch.randint(spread, (tokens, 8), generator=g, device="cuda"),
        "num_experts": 258,
    }
    for way in WAYS:
        check(arguments, way)
    rows_MD, permutation = moe_permute(**arguments)
    assert_same_bits(rows_MD, arguments["x_ND"][permutation.order_M // 8])
