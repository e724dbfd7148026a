"""log_softmax against torch's own in fp64."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.log_softmax import cases, log_softmax
from suzuri.kernels.log_softmax.reference import CHUNK
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    LOW,
    Arguments,
    assert_close,
    assert_same_bits,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    threads,
)


def plain(logits_NV: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV, -1)


def assert_is_log_softmax(logits_NV: Tensor) -> None:
    found = log_softmax(logits_NV)
    fp64 = logits_NV.dtype == torch.float64
    assert found.dtype == (torch.float64 if fp64 else torch.float32)
    logits = logits_NV.double()
    expected = plain(logits)
    # The normaliser rounds once as a number of the size of the largest logit plus log V; the sum
    # under its log carries some 20 roundings.
    most = torch.where(logits.isinf(), 0.0, logits.abs()).amax(-1, keepdim=True)
    size = (most + 13).expand(logits.shape)
    assert_close(found, expected, magnitude=size, noise=FP64_NOISE if fp64 else 3 * FP32_EPS)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_the_library_in_fp64(device: str, case: str, dtype: torch.dtype):
    logits = cases.build(case, dtype, generator(1, device))["logits_NV"]
    assert logits[0, 1] == -torch.inf
    assert_is_log_softmax(logits)


@each_dtype
@pytest.mark.parametrize(
    "masked",
    [slice(0, 2048), slice(2048, 4096), slice(4096, 4099), slice(0, 4098), slice(1, 4099)],
    ids=["first chunk", "second chunk", "last chunk", "all but the last", "all but the first"],
)
def test_masks_over_whole_chunks(device: str, masked: slice, dtype: torch.dtype):
    logits = cases.build("odd", dtype, generator(2, device))["logits_NV"]
    logits[1:, masked] = -torch.inf
    assert CHUNK == 2048
    assert_is_log_softmax(logits)
    assert (log_softmax(logits)[1:, masked] == -torch.inf).all()


@pytest.mark.parametrize("shift", [-3e38, -1e4, 1e4, 3e38])
def test_large_logits_do_not_overflow(device: str, shift: float):
    logits = torch.full((2, 3000), shift, device=device)
    logits[1, 2999] = -torch.inf
    found = log_softmax(logits)
    count = torch.tensor([3000.0, 2999.0], dtype=torch.float64, device=device)
    size = torch.full((2, 2999), abs(shift), dtype=torch.float64, device=device)
    expected = -count.log()[:, None].expand(2, 2999)
    assert_close(found[:, :2999], expected, magnitude=size, noise=FP32_EPS)


def test_one_id_has_all_the_probability(device: str):
    assert log_softmax(torch.tensor([[7.25], [-3e38]], device=device)).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_chunks_are_folded_in_order(device: str, dtype: torch.dtype):
    """A chunk's share of the result does not depend on how the vocabulary goes on: adding chunks
    that are wholly masked changes no bit."""
    logits = cases.build("tiny", dtype, generator(3, device))["logits_NV"]
    masked = torch.full((9, 5000), -torch.inf, dtype=dtype, device=device)
    longer = log_softmax(torch.cat([logits, masked], 1))
    assert_same_bits(longer[:, :301], log_softmax(logits))


def test_gradient_is_that_of_finite_differences():
    logits = torch.randn(2, 7, generator=generator(4), dtype=torch.float64)
    check_gradients(log_softmax, {"logits_NV": logits}, ["logits_NV"])


@pytest.mark.parametrize("masked", [False, True])
def test_gradient_across_chunks_agrees_with_the_library(device: str, masked: bool):
    arguments: Arguments = cases.build("odd", torch.float64, generator(5, device))
    if masked:
        arguments["logits_NV"][1, 2048:4096] = -torch.inf

    def kept(op):
        return lambda logits_NV: op(logits_NV).masked_fill(logits_NV == -torch.inf, 0.0)

    ours = gradients(kept(log_softmax), arguments, ["logits_NV"])[0]
    theirs = gradients(kept(plain), arguments, ["logits_NV"])[0]
    assert_close(ours, theirs, magnitude=torch.full_like(theirs, 100.0))


@each_low_dtype
def test_gradient_in_the_dtype_of_the_logits(device: str, dtype: torch.dtype):
    logits = torch.randn(3, 50, generator=generator(6, device), device=device).to(dtype)
    check_low_precision_gradients(log_softmax, {"logits_NV": logits}, ["logits_NV"])


@each_low_dtype
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 129, 2047, 2048, 2049, 6000])
def test_the_loops_have_the_values_of_the_reference(vocabulary: int, dtype: torch.dtype):
    """The same bits, a NaN being a NaN: also where logits are masked, huge, or no numbers."""
    logits = 4 * torch.randn(12, vocabulary, generator=generator(7))
    last = vocabulary - 1
    logits[1, : vocabulary // 2] = -torch.inf
    logits[2, last] = torch.inf
    logits[3, last // 2] = torch.nan
    logits[4] = -torch.inf
    logits[5, 0], logits[5, last] = 3e38, -3e38
    logits[6] = -3e38
    logits[7], logits[7, last] = -0.0, 0.0
    for given in (logits.to(dtype), logits.to(dtype).T.contiguous().T):
        with dispatch.force("reference"):
            expected = log_softmax(given)
        for count in (1, 2):
            with threads(count):
                found = log_softmax(given)
                assert torch.equal(found.isnan(), expected.isnan())
                assert_same_bits(found.nan_to_num(7.0), expected.nan_to_num(7.0))
