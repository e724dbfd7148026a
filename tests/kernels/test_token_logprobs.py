"""token_logprobs against torch in fp64, and bit for bit against log_softmax of the whole logits."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import matmul
from suzuri.kernels.token_logprobs import cases, token_logprobs, token_logprobs_and_entropy
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
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
    widened,
)

TRAINED = ["h_ND", "unembed_VD"]


def plain(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    scale: float,
    temperature_N: Tensor | None = None,
) -> Tensor:
    logits_NV = h_ND @ unembed_VD.T * scale
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N[:, None]
    return torch.log_softmax(logits_NV, -1).gather(1, targets_N[:, None])[:, 0]


def through_the_logits(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    scale: float,
    temperature_N: Tensor | None = None,
) -> Tensor:
    """What the sampler does: the head, then log_softmax, then the chosen token's entry."""
    wide = torch.promote_types(h_ND.dtype, torch.float32)
    logits_NV = matmul(h_ND, unembed_VD, scale=scale, out_dtype=wide)
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N.to(wide)[:, None]
    return log_softmax(logits_NV).gather(1, targets_N[:, None])[:, 0]


def temperatures(rows: int, device: str) -> Tensor:
    return 0.3 + torch.rand(rows, generator=generator(7, device), device=device)


@each_dtype
@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_the_library_in_fp64(device: str, case: str, tempered: bool, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    arguments["temperature_N"] = temperatures(len(arguments["h_ND"]), device) if tempered else None
    found = token_logprobs(**arguments)
    fp64 = dtype == torch.float64
    assert found.dtype == (torch.float64 if fp64 else torch.float32)
    expected = plain(**widened(arguments))
    # Logits reach about 100 and round in fp32.
    size = torch.full_like(expected, 100.0)
    assert_close(found, expected, magnitude=size, noise=FP64_NOISE if fp64 else 4 * FP32_EPS)


@each_dtype
@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
@pytest.mark.parametrize("vocabulary", [1, 2047, 2048, 2049, 4096, 4099])
def test_the_bits_of_log_softmax(device: str, vocabulary: int, tempered: bool, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(2, device))
    arguments["unembed_VD"] = arguments["unembed_VD"][:vocabulary]
    borders = torch.tensor([0, 2047, 2048, 4095, 4098], device=device)
    arguments["targets_N"] = borders.clamp(max=vocabulary - 1)
    arguments["scale"] = 1 / 24
    arguments["temperature_N"] = temperatures(5, device) if tempered else None
    assert_same_bits(token_logprobs(**arguments), through_the_logits(**arguments))


def test_rows_alone_have_the_bits_of_the_batch(device: str):
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(3, device))
    arguments["temperature_N"] = temperatures(5, device)
    together = token_logprobs(**arguments)
    per_row = ("h_ND", "targets_N", "temperature_N")
    for rows in (slice(0, 1), slice(3, 4), slice(1, 5)):
        part = arguments | {name: arguments[name][rows] for name in per_row}
        assert_same_bits(token_logprobs(**part), together[rows])


def test_temperature_one_is_raw(device: str):
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(4, device))
    ones = torch.ones(9, device=device)
    assert_same_bits(token_logprobs(**arguments, temperature_N=ones), token_logprobs(**arguments))


def test_probabilities_of_all_targets_sum_to_one(device: str):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(5, device))
    h = arguments["h_ND"][:1].expand(301, -1)
    every = torch.arange(301, device=device)
    logprobs = token_logprobs(h, arguments["unembed_VD"], every, scale=0.05)
    assert logprobs.double().exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_gradients_are_those_of_finite_differences():
    g = generator(6)
    arguments: Arguments = {
        "h_ND": torch.randn(3, 4, generator=g, dtype=torch.float64),
        "unembed_VD": torch.randn(5, 4, generator=g, dtype=torch.float64),
        "targets_N": torch.tensor([0, 4, 4]),
        "scale": 0.7,
        "temperature_N": torch.tensor([0.5, 1.0, 2.0]),
    }
    check_gradients(token_logprobs, arguments, TRAINED)


def test_gradients_across_chunks_agree_with_the_library(device: str):
    arguments: Arguments = cases.build("odd", torch.float64, generator(7, device))
    ours = gradients(token_logprobs, arguments, TRAINED)
    theirs = gradients(plain, arguments, TRAINED)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, magnitude=torch.full_like(b, 20.0))


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(8, device))
    check_low_precision_gradients(token_logprobs, arguments, TRAINED)


@pytest.mark.parametrize("target", [-1, -100, 37])
def test_a_target_outside_the_vocabulary_is_refused(target: int):
    h_ND, unembed_VD = torch.ones(2, 4), torch.ones(37, 4)
    with pytest.raises(IndexError, match=f"target {target} is not in"):
        token_logprobs(h_ND, unembed_VD, torch.tensor([3, target]), scale=1.0)


@each_low_dtype
@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
@pytest.mark.parametrize("vocabulary", [1, 63, 2047, 2049, 4099])
def test_the_loops_have_the_bits_of_the_reference(
    vocabulary: int, tempered: bool, dtype: torch.dtype
):
    arguments: Arguments = cases.build("odd", dtype, generator(9))
    arguments["unembed_VD"] = arguments["unembed_VD"][:vocabulary]
    targets = torch.randint(vocabulary, (5, 3), generator=generator(10))
    arguments["targets_N"] = torch.cat([targets, targets[:, :1]], 1)
    arguments["temperature_N"] = temperatures(5, "cpu") if tempered else None
    for scale in (1.0, 0.05, 7.0):
        arguments["scale"] = scale
        with dispatch.force("reference"):
            expected = token_logprobs_and_entropy(**arguments)
        for found, wanted in zip(token_logprobs_and_entropy(**arguments), expected, strict=True):
            assert_same_bits(found, wanted, f"scale {scale}")
        assert_same_bits(token_logprobs(**arguments), expected[0])


def test_much_work_goes_to_all_threads_with_the_same_bits():
    g = generator(11)
    h, unembed = torch.randn(300, 16, generator=g), torch.randn(3000, 16, generator=g)
    given = (h, unembed, torch.randint(3000, (300,), generator=g))
    with threads(1):
        expected = token_logprobs_and_entropy(*given, scale=0.3)
    with threads(2):
        for found, wanted in zip(
            token_logprobs_and_entropy(*given, scale=0.3), expected, strict=True
        ):
            assert_same_bits(found, wanted)
