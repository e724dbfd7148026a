"""nvfp4 on a GPU: dequantising bit for bit, quantising with the bytes of the CPU."""

import dataclasses

import pytest
import torch

from suzuri.kernels.nvfp4 import Nvfp4, cases, dequantize, quantize, reference
from tests.kernels.compare import LOW, assert_same_bits, each_low_dtype, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import without_sync

pytest.importorskip("triton")
from suzuri.kernels.nvfp4 import kernel


def parts(weight: Nvfp4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.codes, weight.block_scales, weight.global_scales


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    weight = Nvfp4(**reference.quantize(**cases.build(case, dtype, generator(1, device))))
    weight.global_scales.mul_(1.37)  # not a power of two, as other makers' checkpoints have it
    expected = reference.dequantize(*parts(weight))
    for block, warps in ((2048, 4), (8, 1), (512, 8)):
        # The interpreter cuts off instead of rounding to bf16: its values are compared below.
        for out_dtype in LOW if device == "cuda" else ():
            with nan_filled():
                found = kernel.dequantize(*parts(weight), out_dtype, block=block, num_warps=warps)
            assert_same_bits(found, expected.to(out_dtype), f"block {block}")
    exact = dataclasses.replace(weight, global_scales=torch.ones_like(weight.global_scales))
    with nan_filled():
        found = kernel.dequantize(*parts(exact), torch.float32)
    assert_same_bits(found, reference.dequantize(*parts(exact)).float())


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)
def test_every_code_under_every_scale(device: str):
    """256 scales, NaN and negative ones included, times 256 bytes of codes."""
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(32)
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256)
    given = (
        codes.view(1, 256, 256),
        scales.view(torch.float8_e4m3fn).view(1, 256, 32),
        torch.ones(1, device=device),
    )
    found = kernel.dequantize(*given, torch.float32)
    expected = reference.dequantize(*given).float()
    nan = expected.isnan()
    assert int(nan.sum()) == 2 * 512
    assert (found.isnan() == nan).all()
    assert_same_bits(found[~nan], expected[~nan])


@on_gpu
@each_low_dtype
def test_quantising_gives_the_bytes_of_the_cpu(dtype: torch.dtype):
    for case in ("tiny", "odd", "one_block"):
        for seed in range(4):
            weight = cases.build(case, dtype, generator(seed))["weight_ENK"]
            found, expected = quantize(weight.cuda()), quantize(weight)
            assert torch.equal(found.codes.cpu(), expected.codes), (case, seed)
            for name in ("block_scales", "global_scales"):
                mine, other = getattr(found, name), getattr(expected, name)
                assert torch.equal(mine.cpu().float(), other.float()), (case, seed, name)


@on_gpu
def test_dequantising_does_not_wait():
    weight = quantize(cases.build("tiny", torch.bfloat16, generator(3, "cuda"))["weight_ENK"])
    with without_sync():
        found = dequantize(weight)
    assert_same_bits(found, reference.dequantize(*parts(weight)))
