"""sample_tokens' kernels: the ids of the reference, ties, masks and rows without an answer."""

import math

import pytest
import torch

from suzuri.kernels.sample_tokens import cases, reference, sample_tokens
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.sample_tokens import kernel

devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_ids_of_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    for seed in range(4):
        given: Arguments = cases.build(case, dtype, generator(seed, device))
        for purpose in (0, 1, 5):
            expected = reference.sample_tokens(**given, purpose=purpose)
            for block, warps in ((2048, 4), (64, 1), (4096, 8)):
                if device == "cpu" and (purpose, seed) != (0, 0) and block != 2048:
                    continue
                with nan_filled():
                    found = kernel.sample_tokens(
                        **given, purpose=purpose, block=block, num_warps=warps
                    )
                assert_same_bits(found, expected, f"purpose {purpose}, block {block}")


@devices
def test_the_noise_itself(device: str):
    """All logits 0 but one id that is masked: the draw is the argmax of the noise, whose every
    value would move it."""
    rows = 6 if device == "cpu" else 2000
    given: Arguments = {
        "logits_NV": torch.zeros(rows, 513, device=device),
        "temperature_N": torch.ones(rows, device=device),
        "seeds_N": torch.arange(rows, device=device) * 0x1234567890ABCD - 5,
        "positions_N": torch.arange(rows, device=device) * 1000003 % 2**32,
        "sample_index_N": torch.arange(rows, device=device) % 7,
    }
    given["logits_NV"][:, 3] = -math.inf
    expected = reference.sample_tokens(**given, purpose=2)
    assert_same_bits(kernel.sample_tokens(**given, purpose=2), expected)
    assert (expected != 3).all()


@devices
def test_ties_masks_and_rows_without_an_answer(device: str):
    logits = torch.full((8, 5000), -1.0, device=device)
    logits[0, [70, 4100]] = 2.0
    logits[1] = -math.inf
    logits[2, 4999] = math.nan
    logits[3] = -math.inf
    logits[3, 4321] = -3.0
    logits[4, 17] = math.inf
    logits[5, [0, 4096]] = torch.tensor([-0.0, 0.0], device=device)
    logits[6, 2048] = math.nan
    greedy = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], device=device)
    logits[7] = -math.inf
    index = torch.arange(8, device=device)
    for block in (2048, 512):
        found = kernel.sample_tokens(logits, greedy, index, index, index, 0, block=block)
        assert found.tolist() == [70, -1, -1, 4321, 17, 0, -1, -1]


@in_interpreter
def test_strides_no_rows_and_fp64():
    given: Arguments = cases.build("odd", torch.float32, generator(2))
    expected = kernel.sample_tokens(**given, purpose=0)
    wide = torch.zeros(5, 74)
    wide[:, ::2] = given["logits_NV"]
    strided = changed(given, logits_NV=wide[:, ::2])
    assert_same_bits(kernel.sample_tokens(**strided, purpose=0), expected)
    none: Arguments = {name: value[:0] for name, value in given.items()}
    assert kernel.sample_tokens(**none, purpose=0).shape == (0,)
    with pytest.raises(NotImplementedError, match=r"sample_tokens of torch\.float64"):
        kernel.sample_tokens(**changed(given, logits_NV=wide.double()), purpose=0)


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("sample_tokens", dtype)
    given: Arguments = cases.build("inkling", dtype, generator(3, "cuda"))
    with without_sync():
        found = sample_tokens(**given)
    assert_same_bits(found, reference.sample_tokens(**given, purpose=0))
