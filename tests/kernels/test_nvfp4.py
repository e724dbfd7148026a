"""nvfp4 against values worked out by hand, against all block scales, and against itself."""

import math
import struct

import pytest
import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import Nvfp4, cases, dequantize, quantize
from tests.kernels.compare import device_cases, generator

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """An e4m3 number from its bits: sign, 4 exponent bits of bias 7, 3 fraction bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x: float) -> float:
    """Nearest bf16 of an fp32 value, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def raw(weight: Nvfp4) -> list[Tensor]:
    parts = (weight.codes, weight.block_scales, weight.global_scales)
    return [part.contiguous().view(torch.uint8) for part in parts]


def assert_same_bytes(one: Nvfp4, other: Nvfp4) -> None:
    for a, b in zip(raw(one), raw(other), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_values_worked_out_by_hand() -> None:
    codes = torch.tensor([[[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]]], dtype=torch.uint8)
    scales = torch.tensor([[[1.5]]]).to(torch.float8_e4m3fn)
    weight = Nvfp4(codes=codes, block_scales=scales, global_scales=torch.tensor([0.25]))
    # 1.5 * 0.25 = 0.375 times 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, ..., -6, 0: low four bits first.
    expected = [0.1875, 0.375, 0.5625, 0.75, 1.125, 1.5, 2.25]
    expected = [*expected, -0.0, *(-value for value in expected), 0.0]
    values = dequantize(weight, out_dtype=torch.float32)[0, 0]
    assert values.tolist() == expected and math.copysign(1, values[7].item()) == -1


def test_every_code_under_every_scale(device: str) -> None:
    scale_bytes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    for global_scale in (1.0, 0.0123, 3.1e-5, 7 / 3):
        exact = fp32(global_scale)
        codes = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8)
        scales = torch.tensor(scale_bytes, dtype=torch.uint8).view(torch.float8_e4m3fn)
        weight = Nvfp4(
            codes=codes.expand(1, len(scale_bytes), 8).to(device),
            block_scales=scales.view(1, -1, 1).to(device),
            global_scales=torch.tensor([global_scale], device=device),
        )
        values = dequantize(weight)[0].tolist()
        for row, byte in enumerate(scale_bytes):
            for code in range(16):
                sign = -1 if code > 7 else 1
                product = sign * E2M1[code & 7] * e4m3(byte)
                assert values[row][code] == bf16(fp32(product * exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_dtype_holds_the_bf16_values(dtype: torch.dtype) -> None:
    weight = quantize(**cases.build("tiny", torch.bfloat16, generator(1, "cpu")))
    weight = Nvfp4(
        codes=weight.codes, block_scales=weight.block_scales, global_scales=torch.full([3], 0.0123)
    )
    assert torch.equal(dequantize(weight, out_dtype=dtype), dequantize(weight).to(dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_goes_to_the_even_code(sign: int) -> None:
    """The other values of each block are on the grid of one scale, which is therefore the best."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    blocks = [[*E2M1[1:], *E2M1[1:], 6.0, sign * middle] for middle in middles]
    weight = quantize(torch.tensor([blocks]) * 448)
    assert weight.global_scales.item() == 1
    assert weight.block_scales.to(torch.float32).flatten().tolist() == [448.0] * 7
    rounded = dequantize(weight, out_dtype=torch.float32)[0, :, -1] / 448
    assert rounded.tolist() == [sign * value for value in (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)]


@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_block_scale_is_the_best_of_all(device: str, case: str) -> None:
    if case.startswith("inkling") and device == "cpu":
        pytest.skip("large: the accelerator's test")
    weight_ENK = cases.build(case, torch.float32, generator(3, device))["weight_ENK"]
    result = quantize(weight_ENK.bfloat16())
    source = weight_ENK.bfloat16().double().cpu()
    blocks = source.unflatten(-1, (-1, 16))[:, :64]
    unit = result.global_scales.double().cpu()[:, None, None, None]
    best = torch.full(blocks.shape[:-1], math.inf, dtype=torch.float64)
    grid = torch.tensor(E2M1, dtype=torch.float64)
    for byte in range(1, 127):
        scaled = blocks.abs() / unit / e4m3(byte)
        nearest = grid[(scaled[..., None] - grid).abs().argmin(-1)]
        loss = ((scaled - nearest) * unit * e4m3(byte)).square().sum(-1)
        best = torch.minimum(best, loss)
    ours = dequantize(result).double().cpu().unflatten(-1, (-1, 16))[:, :64]
    loss = (ours - blocks).square().sum(-1)
    assert bool((loss <= best * (1 + 1e-5)).all())


@pytest.mark.parametrize("seed", range(48))
def test_quantising_twice_changes_no_byte(seed: int) -> None:
    g = generator(seed, "cpu")
    n, k = (
        int(torch.randint(1, 40, (), generator=g)),
        16 * int(torch.randint(1, 9, (), generator=g)),
    )
    power = float(torch.rand((), generator=g)) * 50 - 30
    x = torch.randn(2, n, k, generator=g) * 10.0**power
    kinds = {
        0: x,
        1: x * torch.exp(3 * torch.randn(2, n, k, generator=g)),
        2: x
        * torch.exp(6 * torch.randn(2, n, k // 16, 1, generator=g))
        .repeat(1, 1, 1, 16)
        .view(2, n, k),
        3: torch.randint(-6, 7, (2, n, k), generator=g) * 2.0 ** int(power / 4),
        4: torch.where(torch.rand(2, n, k, generator=g) < 0.9, torch.zeros(()), x),
        5: (1 + torch.rand(2, n, k, generator=g)) * 1344,
        6: torch.randint(0, 3, (2, n, k), generator=g) * x[0, 0, 0],
        7: x * torch.exp(10 * torch.randn(2, n, k, generator=g)),
    }
    once = quantize(kinds[seed % 8].clamp(-1e29, 1e29))
    values = dequantize(once)
    assert bool(values.isfinite().all())
    assert_same_bytes(once, quantize(values))


def test_each_expert_and_block_stands_alone() -> None:
    weight_ENK = cases.build("tiny", torch.bfloat16, generator(5, "cpu"))["weight_ENK"]
    whole = quantize(weight_ENK)
    for expert in range(3):
        alone = quantize(weight_ENK[expert : expert + 1])
        assert torch.equal(alone.codes[0], whole.codes[expert])
        assert torch.equal(alone.global_scales[0], whole.global_scales[expert])
    rows = quantize(weight_ENK[:1, torch.tensor([3, 1, 5, 0, 2, 4])])
    assert torch.equal(rows.codes[0, 0], whole.codes[0, 3])


def test_global_scale_is_the_smallest_power_of_two_that_reaches_the_largest_value() -> None:
    for amax, exponent in ((2688.0, 0), (3000.0, 1), (1344.0, -1), (0.02, -17), (1e-33, -100)):
        weight = torch.zeros(1, 1, 16)
        weight[..., 5] = -amax
        assert quantize(weight).global_scales.item() == 2.0**exponent
    nothing = quantize(torch.zeros(1, 2, 32))
    assert not dequantize(nothing).any() and nothing.global_scales.item() == 1


def test_negative_zero_becomes_zero() -> None:
    weight = torch.full((1, 1, 16), -0.0)
    weight[..., 0] = 3.0
    weight[..., 1] = -1e-9
    assert quantize(weight).codes.flatten().tolist() == [7, 0, 0, 0, 0, 0, 0, 0]


def test_devices_agree(device: str) -> None:
    for case in ("tiny", "odd", "inkling_small_expert"):
        weight_ENK = cases.build(case, torch.bfloat16, generator(6, "cpu"))["weight_ENK"]
        if case == "inkling_small_expert":
            weight_ENK = weight_ENK[:, :256]
        moved = quantize(weight_ENK.to(device))
        assert_same_bytes(moved, quantize(weight_ENK))
        assert torch.equal(dequantize(moved).cpu(), dequantize(quantize(weight_ENK)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**100])
def test_values_that_have_no_place_are_refused(value: float) -> None:
    weight = torch.zeros(1, 2, 16)
    weight[0, 1, 3] = value
    with pytest.raises(ValueError, match="must be finite and below"):
        quantize(weight)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 24\] must be"):
        quantize(torch.zeros(1, 2, 24))
    with pytest.raises(ValueError, match="must be"):
        quantize(torch.zeros(2, 32))
    with pytest.raises(ValueError, match="float64 must be"):
        quantize(torch.zeros(1, 2, 16, dtype=torch.float64))
