"""gelu's kernel against the formula in fp64."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.gelu import cases, gelu, reference
from tests.kernels.compare import FP32_EPS, LOW, assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.gelu import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_formula_in_every_launch(device: str, case: str, dtype: torch.dtype):
    x: torch.Tensor = cases.build(case, dtype, generator(1, device))["x"]
    with nan_filled():
        found = kernel.gelu(x)
    # 1 + erf cancels on the left: the error there is that of erf, absolutely.
    noise = {"noise": 4 * FP32_EPS, "magnitude": x.double().abs()}
    ulps = 4 if dtype == torch.float32 else 0.502
    assert_close(found, reference.gelu(x.double()), ulps=ulps, **noise)
    for block, warps in ((64, 1), (8192, 8)):
        with nan_filled():
            assert_same_bits(kernel.gelu(x, block=block, num_warps=warps), found, f"block {block}")


@in_interpreter
def test_strides_no_elements_and_fp64():
    x = torch.randn(6, 10, generator=generator(2))
    assert_same_bits(kernel.gelu(x.T), kernel.gelu(x).T.contiguous())
    assert kernel.gelu(x[:0]).shape == (0, 10)
    assert_same_bits(kernel.gelu(torch.zeros(3, 1)), torch.zeros(3, 1))
    with pytest.raises(NotImplementedError, match=r"gelu of torch\.float64"):
        kernel.gelu(x.double())


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    for width in (1, 37, 129):
        assert_rows_alone_on_gpu(f"gelu {width}", dtype)
    x: torch.Tensor = cases.build("inkling_vision", dtype, generator(3, "cuda"))["x"]
    with dispatch.force("reference"):
        expected = gelu(x)
    with without_sync():
        found = gelu(x)
    noise = {"noise": 4 * FP32_EPS, "magnitude": x.double().abs()}
    assert_close(found, expected.double(), ulps=2.01, **noise)
