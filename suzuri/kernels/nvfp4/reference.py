"""NVFP4 in elementwise fp32 arithmetic. Read `quantize` first."""

import math

import torch
from torch import Tensor

from suzuri.kernels.exact import tree_sum

BLOCK = 16
LARGEST = 6.0
"""Of an e2m1 number: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
LARGEST_SCALE = 448.0
MIN_EXPONENT, MAX_EXPONENT = -100, 90
"""Of the global scale: its products stay normal in fp32, and finite in bf16."""
SCALES = [
    *(math.ldexp(m, -9) for m in range(1, 8)),
    *(math.ldexp(8 + m, e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)),
]
"""The positive e4m3 numbers, ascending: 2^-9 .. 448."""
OFFSETS = tuple(range(-3, 7))
"""Block scales to try, in steps from the first that reaches amax / 6: from a little clipping to a
largest code of 4. A wider range found no smaller error (benchmarks/kernels/nvfp4_error.py). And
whichever scale is chosen, every smaller one with the same values was tried too, so that the same
scale is chosen again for what was dequantised (tests/kernels/test_nvfp4_search.py)."""
CHUNK_BLOCKS, ACCELERATOR_BLOCKS = 1 << 15, 1 << 20
"""Blocks at a time: what stays in a CPU's cache, and what keeps a GPU busy between launches."""
# x + m - m rounds x to a multiple of m / (1.5 * 2^23), ties to even, for 0 <= x < m / 3.
HALVES, ONES, TWOS = (math.ldexp(1.5, e) for e in (22, 23, 24))


def quantize(weight_ENK: Tensor) -> dict[str, Tensor]:
    experts, rows, columns = weight_ENK.shape
    device = weight_ENK.device
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device=device)
    exponents: list[int] = []
    for e in range(experts):
        exponent = _quantize_matrix(weight_ENK[e], codes[e], scales[e])
        exponents.append(exponent)
    globals_E = torch.tensor(
        [math.ldexp(1.0, e) for e in exponents], dtype=torch.float32, device=device
    )
    return {"codes": codes, "block_scales": scales, "global_scales": globals_E}


def _quantize_matrix(weight_NK: Tensor, codes: Tensor, scales: Tensor) -> int:
    """Fills codes [N, K/2] and scales [N, K/16]; returns the exponent of the global scale.

    Repeats on its own result while that would call for a smaller global scale: so the scale is
    the one that the quantised matrix would get, and quantising twice changes nothing.
    """
    exponent = _exponent(weight_NK.abs().amax().item() if weight_NK.numel() else 0.0)
    source = weight_NK
    while True:
        amax = _quantize_rows(source, codes, scales, exponent)
        if not amax:
            return 0  # that of zeros: the values were too small to keep
        settled = _exponent(amax)
        if settled >= exponent:
            return exponent
        source = dequantize(
            codes.unsqueeze(0),
            scales.unsqueeze(0),
            torch.tensor([math.ldexp(1.0, exponent)], device=codes.device),
        )[0]
        exponent = settled


def _exponent(amax: float) -> int:
    """The smallest e with amax <= 6 * 448 * 2^e."""
    if not amax < 2.0**100:
        raise ValueError(f"nvfp4: the largest value is {amax}; must be finite and below 2^100")
    fraction, exponent = math.frexp(amax / (LARGEST * LARGEST_SCALE))
    exponent -= fraction == 0.5
    return min(max(exponent, MIN_EXPONENT), MAX_EXPONENT) if amax else 0


def _quantize_rows(weight_NK: Tensor, codes: Tensor, scales: Tensor, exponent: int) -> float:
    """Quantises in pieces of bounded memory; returns the largest magnitude of the result."""
    blocks_per_row = scales.shape[-1]
    chunk = CHUNK_BLOCKS if weight_NK.device.type == "cpu" else ACCELERATOR_BLOCKS
    step = max(1, chunk // max(blocks_per_row, 1))
    amax = 0.0
    for first in range(0, weight_NK.shape[0], step):
        rows = slice(first, first + step)
        x = weight_NK[rows].to(torch.float32) * math.ldexp(1.0, -exponent)  # a power of two: exact
        x = x.reshape(-1, BLOCK)
        scale, magnitude = _best(x.abs())
        code = _code(magnitude) + torch.where((x < 0) & (magnitude > 0), 8, 0)
        code = code.to(torch.uint8).reshape(codes[rows].shape[0], -1, 2)
        codes[rows] = code[..., 0] + code[..., 1] * 16
        scales[rows] = scale.to(torch.float8_e4m3fn).reshape(scales[rows].shape)
        amax = max(amax, (magnitude * scale).amax().item() if x.numel() else 0.0)
    return math.ldexp(amax, exponent)


def _best(x: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes [B, 16] -> (scale [B, 1], e2m1 magnitudes [B, 16]) of least squared error.

    Tries the scales next to amax / 6; of equally good ones the smallest wins.
    """
    table = torch.tensor(SCALES, dtype=torch.float32, device=x.device)
    # A tensor on the device: by a plain number a GPU would multiply with a rounded reciprocal.
    largest = x.new_full((), LARGEST)
    nearest = torch.searchsorted(table, x.amax(-1, keepdim=True) / largest)
    scale = torch.full_like(x[:, :1], SCALES[0])
    error = torch.full_like(scale, torch.inf)
    magnitude = torch.zeros_like(x)
    for offset in OFFSETS:
        other = table[(nearest + offset).clamp(0, len(SCALES) - 1)]
        rounded = _round(x / other)
        difference = x - rounded * other
        loss = tree_sum(difference * difference).unsqueeze(-1)
        is_better = loss < error
        scale = torch.where(is_better, other, scale)
        magnitude = torch.where(is_better, rounded, magnitude)
        error = torch.where(is_better, loss, error)
    return scale, magnitude


def _round(x: Tensor) -> Tensor:
    """To the nearest e2m1 magnitude, ties to the even code."""
    x = x.clamp(max=LARGEST)
    coarse = torch.where(x < 4, (x + ONES) - ONES, (x + TWOS) - TWOS)
    return torch.where(x < 2, (x + HALVES) - HALVES, coarse)


def _code(magnitude: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 -> 0 .. 7."""
    twice = magnitude * 2  # 0, 1, 2, 3, 4, 6, 8, 12
    return torch.where(twice < 4, twice, torch.where(twice < 8, twice / 2 + 2, twice / 4 + 4))


def dequantize(codes: Tensor, block_scales: Tensor, global_scales: Tensor) -> Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    kind = pairs & 7
    # Twice the magnitude is an integer: 0..3 below 2, then 2 or 3 times a power of two.
    twice = torch.where(kind < 4, kind, (2 + (kind & 1)) << ((kind >> 1) - 1).clamp(0))
    magnitude = twice.to(torch.float32) * 0.5
    value = torch.where(pairs > 7, -magnitude, magnitude)
    blocks = value.unflatten(-1, (-1, BLOCK)) * block_scales.to(torch.float32).unsqueeze(-1)
    scaled = blocks.flatten(-2) * global_scales[:, None, None]
    return scaled.to(torch.bfloat16)
