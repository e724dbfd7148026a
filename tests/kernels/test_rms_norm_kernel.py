"""rms_norm's kernel: one rounding of the fp64 norm, and the same bits in every launch."""

import pytest
import torch
from torch.nn import functional

from suzuri.kernels import dispatch
from suzuri.kernels.rms_norm import cases, reference, rms_norm
from tests.kernels.compare import (
    LOW,
    ONE_ROUNDING,
    Arguments,
    assert_close,
    assert_same_bits,
    generator,
    widened,
)
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.rms_norm import kernel

EPS = 1e-6


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_formula_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    with nan_filled():
        y_ND = kernel.rms_norm(**given, eps=EPS, out_dtype=dtype)
    wide = widened(given)
    expected = functional.rms_norm(wide["x_ND"], wide["weight_D"].shape, wide["weight_D"], EPS)
    assert_close(y_ND, expected, ulps=8 if dtype == torch.float32 else ONE_ROUNDING)
    for elements, warps in ((1, 1), (256, 2), (8192, 8)):
        with nan_filled():
            other = kernel.rms_norm(
                **given, eps=EPS, out_dtype=dtype, elements=elements, num_warps=warps
            )
        assert_same_bits(other, y_ND, f"{elements} elements, {warps} warps")


@in_interpreter
@pytest.mark.parametrize("width", [1, 45, 4096, 4099, 8200])
def test_the_tree_is_that_of_the_reference(width: int):
    """Integers whose sum of squares depends on its order in fp32, and chunks beyond 4096."""
    x = torch.randint(-3000, 3000, (2, width), generator=generator(width)).float()
    ones = torch.ones(width)
    expected = reference.rms_norm(x, ones, EPS, torch.float32)
    # numpy's rsqrt may be a unit off torch's; another order of the sum is many more.
    assert_close(
        kernel.rms_norm(x, ones, EPS, torch.float32), expected.double(), ulps=1.01, noise=0
    )


@in_interpreter
def test_heads_where_they_lie_and_no_rows():
    fused = torch.randn(5, 3 * 4 * 16 + 7, generator=generator(2))
    weight = torch.rand(16, generator=generator(3))
    heads = fused[:, 16 : 16 + 2 * 4 * 16].reshape(5, 2, 4, 16)[:, 1]
    assert not heads.is_contiguous()
    found = kernel.rms_norm(heads, weight, EPS, torch.float32)
    assert_same_bits(found, kernel.rms_norm(heads.contiguous(), weight, EPS, torch.float32))
    assert kernel.rms_norm(heads[:0], weight, EPS, torch.float32).shape == (0, 4, 16)
    flat = kernel.rms_norm(heads[None], weight, EPS, torch.float32)[0]
    assert_same_bits(flat, found)


@in_interpreter
def test_fp64_is_refused():
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"rms_norm with torch\.float64: no kernel"):
        kernel.rms_norm(x, x[0], EPS, torch.float64)


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", ["rms_norm 1", "rms_norm 45", "rms_norm 4099", "rms_norm of heads"])
def test_rows_alone(op: str, dtype: torch.dtype):
    assert_rows_alone_on_gpu(op, dtype)


@on_gpu
def test_the_op_runs_the_kernel_without_waiting():
    given: Arguments = cases.build("inkling", torch.bfloat16, generator(4, "cuda"))
    with dispatch.force("reference"):
        expected = rms_norm(**given, eps=EPS)
    with without_sync():
        found = rms_norm(**given, eps=EPS)
    assert_close(found, expected.double(), ulps=1.01, noise=0)
