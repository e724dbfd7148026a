"""log_scaling's kernel against the reference: equal but for the last bit of the logarithm."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.log_scaling import cases, log_scaling, reference
from tests.kernels.compare import LOW, Arguments, assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.log_scaling import kernel

SCALES = (8.0, 0.1)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    with nan_filled():
        found = kernel.log_scaling(**given, n_floor=SCALES[0], alpha=SCALES[1])
    # fp32: alpha, the logarithm and two products are rounded before the last product.
    expected = reference.log_scaling(given["x_NHC"].double(), given["positions_N"], *SCALES)
    assert_close(found, expected, ulps=4 if dtype == torch.float32 else 0.502)
    for block, warps in ((16, 1), (4096, 8)):
        with nan_filled():
            other = kernel.log_scaling(
                **given, n_floor=SCALES[0], alpha=SCALES[1], block=block, num_warps=warps
            )
        assert_same_bits(other, found, f"block {block}")


@in_interpreter
def test_exactly_one_up_to_the_floor_and_strided_rows():
    fused = torch.randn(6, 40, generator=generator(2))
    x = fused[:, 3:33].reshape(6, 5, 6)
    positions = torch.tensor([0, 5, 41, 42, 43, 2**40])
    found = kernel.log_scaling(x, positions, 43, 0.1)
    assert_same_bits(found[:4], x[:4].contiguous())
    assert (found[4:] != x[4:]).any(-1).all()
    assert_same_bits(found, kernel.log_scaling(x.contiguous(), positions, 43, 0.1))
    assert kernel.log_scaling(x[:0], positions[:0], 43, 0.1).shape == (0, 5, 6)
    with pytest.raises(NotImplementedError, match=r"log_scaling of torch\.float64"):
        kernel.log_scaling(x.double(), positions, 43, 0.1)


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("log_scaling", dtype)
    given: Arguments = cases.build("inkling", dtype, generator(3, "cuda"))
    with dispatch.force("reference"):
        expected = log_scaling(**given, n_floor=4096, alpha=0.1)
    with without_sync():
        found = log_scaling(**given, n_floor=4096, alpha=0.1)
    assert_close(found, expected.double(), ulps=2.01, noise=0)
