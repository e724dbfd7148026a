"""penalize_logits' kernel: bit for bit the reference, as every operation is rounded by itself."""

import pytest
import torch

from suzuri.kernels.penalize_logits import cases, penalize_logits, reference
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.penalize_logits import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    given["logits_NV"][-1, 7] = torch.nan
    given["logits_NV"][0, 8] = -0.0
    for name, value in (("repetition_N", 1.0), ("frequency_N", 0.0), ("presence_N", 0.0)):
        given[name][0] = value
    expected = reference.penalize_logits(**given)
    assert_same_bits(expected[0], given["logits_NV"][0].float())
    for block, warps in ((2048, 4), (64, 1), (8192, 8)):
        with nan_filled():
            found = kernel.penalize_logits(**given, block=block, num_warps=warps)
        nan = expected.isnan()
        assert (found.isnan() == nan).all()
        assert_same_bits(found[~nan], expected[~nan], f"block {block}")


@in_interpreter
def test_strides_no_rows_and_fp64():
    given: Arguments = cases.build("odd", torch.float32, generator(2))
    expected = kernel.penalize_logits(**given)
    wide = torch.zeros(5, 74)
    wide[:, ::2] = given["logits_NV"]
    assert_same_bits(kernel.penalize_logits(**changed(given, logits_NV=wide[:, ::2])), expected)
    rows = ("logits_NV", "slots_N", "repetition_N", "frequency_N", "presence_N")
    none = changed(given, **{name: given[name][:0] for name in rows})
    assert kernel.penalize_logits(**none).shape == (0, 37)
    with pytest.raises(NotImplementedError, match=r"penalize_logits of torch\.float64"):
        kernel.penalize_logits(**changed(given, logits_NV=given["logits_NV"].double()))


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("penalize_logits", dtype)
    given: Arguments = cases.build("inkling", dtype, generator(3, "cuda"))
    with without_sync():
        found = penalize_logits(**given)
    assert_same_bits(found, reference.penalize_logits(**given))
