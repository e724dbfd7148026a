"""moe_combine's kernel has the bits of the reference: the same products and sums, one by one."""

import pytest
import torch

from suzuri.kernels.moe_combine import cases, moe_combine, reference
from suzuri.kernels.moe_permute import Permutation
from tests.kernels.compare import Arguments, assert_same_bits, generator
from tests.kernels.on_triton import kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.moe_combine import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_equal_to_the_reference(device: str, case: str, dtype: torch.dtype):
    drawn: Arguments = cases.build(case, dtype, generator(1, device))
    y, order, weights = drawn["y_MD"], drawn["order_M"], drawn["weights_NJ"]
    inverse = order.argsort()
    for out_dtype in (dtype, torch.float32):
        expected = reference.moe_combine(y, order, inverse, weights, out_dtype)
        for block in (None, 16, 128):
            with nan_filled():
                found = kernel.moe_combine(y, inverse, weights, out_dtype, block)
            assert_same_bits(found, expected, f"{out_dtype}, blocks of {block}")


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others():
    drawn: Arguments = cases.build("inkling", torch.bfloat16, generator(2, "cuda"))
    y, order, weights = drawn["y_MD"], drawn["order_M"], drawn["weights_NJ"]
    inverse = order.argsort()
    whole = moe_combine(y, Permutation(order, inverse, order[:0]), weights, out_dtype=y.dtype)
    for n in range(1, 64):
        alone = y[inverse[: 8 * n]]
        places = torch.arange(8 * n, device="cuda")
        permutation = Permutation(places, places, order[:0])
        part = moe_combine(alone, permutation, weights[:n], out_dtype=y.dtype)
        assert_same_bits(part, whole[:n], f"{n} tokens")
