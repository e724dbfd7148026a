"""moe_combine's own backward."""

import pytest
import torch

from suzuri.kernels.moe_combine import cases, moe_combine
from suzuri.kernels.moe_permute import Permutation
from tests.kernels.backward import backward_cases, check_backward, check_finite_differences
from tests.kernels.compare import Arguments, assert_same_bits, generator, leaves

TRAINED = ["y_MD", "weights_NJ"]


def arguments_of(case: str, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Arguments:
    arguments: Arguments = cases.build(case, dtype, generator(seed, device))
    order = arguments.pop("order_M")
    permutation = Permutation(order, order.argsort(), order[:0])
    return arguments | {"permutation": permutation, "out_dtype": dtype}


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(moe_combine, arguments_of(case, dtype, device), TRAINED)


def test_into_fp32_from_bf16_rows():
    arguments = arguments_of("tiny", torch.bfloat16) | {"out_dtype": torch.float32}
    check_backward(moe_combine, arguments, TRAINED)


def test_finite_differences():
    check_finite_differences(moe_combine, arguments_of("odd", torch.float64, seed=2), TRAINED)


def test_no_rows():
    arguments = arguments_of("tiny", torch.float32)
    none = arguments["permutation"].order_M[:0]
    arguments |= {"permutation": Permutation(none, none, none)}
    arguments |= {name: arguments[name][:0] for name in TRAINED}
    given = leaves(arguments, TRAINED)
    moe_combine(**given).sum().backward()
    for name in TRAINED:
        assert_same_bits(given[name].grad, arguments[name], name)
