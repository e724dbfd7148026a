"""The search for a block scale: which scales are tried, and why no fewer and no more."""

import bisect
import math

import pytest
import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import Nvfp4, dequantize, quantize
from suzuri.kernels.nvfp4.reference import OFFSETS, SCALES
from tests.kernels.test_nvfp4 import E2M1, assert_same_bytes

ROUNDED = {0.5: (0.25, 0.75), 1.0: (0.75, 1.25), 1.5: (1.25, 1.75), 2.0: (1.75, 2.5)}
ROUNDED |= {3.0: (2.5, 3.5), 4.0: (3.5, 5.0), 6.0: (5.0, math.inf)}
"""What becomes each magnitude, ties both ways."""


def under_scale_one(block: list[float]) -> Tensor:
    """A weight of two blocks whose global scale is 1; `block` is the first."""
    return torch.tensor([[[*block, 2688.0, *[0.0] * 15]]])


def chosen(weight: Tensor) -> float:
    result = quantize(weight)
    assert result.global_scales.item() == 1
    return result.block_scales[0, 0, 0].to(torch.float32).item()


def best_of_all(block: list[float]) -> tuple[float, int]:
    """(The scale of least squared error, its steps from the first that reaches amax / 6)."""

    def loss(scale: float) -> float:
        nearest = [min(abs(abs(x) - grid * scale) for grid in E2M1) for x in block]
        return sum(one * one for one in nearest)

    best = min(SCALES, key=loss)
    first = bisect.bisect_left(SCALES, max(map(abs, block)) / 6)
    return best, SCALES.index(best) - first


def tried(first: int) -> list[int]:
    return [min(max(first + offset, 0), len(SCALES) - 1) for offset in OFFSETS]


def test_every_smaller_scale_with_the_same_values_is_tried() -> None:
    """What makes one search enough: all scales, largest magnitudes and places of the search.

    A scale is chosen for values of which the largest becomes a magnitude m. A smaller scale can
    give the same values only where m times their ratio is a magnitude too. If it is tried when the
    values come back, it must have been tried before: then it was no worse, and the smaller of two
    equally good ones is taken.
    """
    pairs = 0
    for index, scale in enumerate(SCALES):
        for magnitude, (low, high) in ROUNDED.items():
            for first in range(len(SCALES)):
                above, largest = 6 * SCALES[first - 1] if first else 0.0, 6 * SCALES[first]
                can_be = low * scale <= largest and high * scale > above
                if not can_be or index not in tried(first):
                    continue
                for smaller in range(index):
                    if magnitude * scale / SCALES[smaller] in ROUNDED:
                        again = bisect.bisect_left(SCALES, magnitude * scale / 6)
                        assert smaller in tried(first) or smaller not in tried(again)
                        pairs += 1
    assert pairs == 480


@pytest.mark.parametrize(
    ("steps", "block"),
    [
        (
            -3,
            [
                5.59375,
                24.25,
                7.125,
                5.0,
                7.0,
                20.75,
                1.8671875,
                4.25,
                20.5,
                21.0,
                5.6875,
                9.75,
                2.6875,
                15.125,
                19.75,
                1.34375,
            ],
        ),
        (
            6,
            [
                24.875,
                24.875,
                8.25,
                24.875,
                0.0,
                0.0,
                29.0,
                16.5,
                12.4375,
                16.5,
                12.4375,
                0.0,
                12.4375,
                16.5,
                16.5,
                16.5,
            ],
        ),
    ],
)
def test_blocks_that_need_the_outer_scales(steps: int, block: list[float]) -> None:
    """Each loses at least a quarter more error under any other scale."""
    best, found = best_of_all(block)
    assert found == steps
    assert chosen(under_scale_one(block)) == best


def test_what_is_too_small_to_keep_is_quantised_as_zeros() -> None:
    """Below a quarter of the smallest value under the smallest global scale."""
    weight = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1)) * 1e-38
    weight[1] = 1.0
    once = quantize(weight)
    assert not once.codes[0].any() and once.codes[1].all()
    assert_same_bytes(once, quantize(dequantize(once)))
    zeros = quantize(torch.zeros(1, 4, 64))
    first = Nvfp4(
        codes=once.codes[:1],
        block_scales=once.block_scales[:1],
        global_scales=once.global_scales[:1],
    )
    assert_same_bytes(first, zeros)
