"""log_softmax's kernels against fp64, and the same bits in every launch."""

import pytest
import torch

from suzuri.kernels.log_softmax import cases, log_softmax
from tests.kernels.compare import assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.log_softmax import kernel

ERROR = 4e-6
"""Absolute, of a log-prob: the fp32 spacing at its size and the error of a sum of exp."""


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_fp64_in_every_launch(device: str, case: str, dtype: torch.dtype):
    logits: torch.Tensor = cases.build(case, dtype, generator(1, device))["logits_NV"]
    with nan_filled():
        found = kernel.log_softmax(logits)
    expected = logits.double().log_softmax(-1)
    assert (found.isinf() == expected.isinf()).all()
    size = torch.full_like(expected, ERROR)
    assert_close(found, expected, ulps=0, noise=1.0, magnitude=size)
    for warps, rows in ((1, 1), (8, 2)):
        with nan_filled():
            again = kernel.log_softmax(logits, warps, rows)
        assert_same_bits(again, found, f"{warps} warps, {rows} rows")


@in_interpreter
def test_a_whole_chunk_masked_and_strides():
    logits = torch.randn(2, 4500, generator=generator(2))
    logits[0, :2048] = -torch.inf
    logits[1, 1:] = -torch.inf
    found = kernel.log_softmax(logits)
    expected = logits.double().log_softmax(-1)
    assert found[1, 0] == 0 and (found.isinf() == expected.isinf()).all()
    finite = found.isfinite()
    assert (found[finite].double() - expected[finite]).abs().max() < ERROR
    assert_same_bits(kernel.log_softmax(logits.T.contiguous().T), found)
    assert kernel.log_softmax(logits[:0]).shape == (0, 4500)


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others():
    logits = 5 * torch.randn(70, 20011, generator=generator(3, "cuda"), device="cuda")
    whole = log_softmax(logits)
    for n in range(1, 71):
        assert_same_bits(log_softmax(logits[:n]), whole[:n], f"first {n}")
        assert_same_bits(log_softmax(logits[-n:]), whole[-n:], f"last {n}")
