"""Which image scales the vision tower folds through, and its weight shapes. Pure arithmetic."""

# pyright: strict

import itertools
import math

Scale = tuple[int, int, int]
"""(frames, side in pixels, channels) covered by one vector."""


def fold_scales(patch_size: int, frames: int, channels: int, num_layers: int) -> tuple[Scale, ...]:
    """The `num_layers` + 1 scales between a pixel, (1, 1, channels), and the whole patch.

    The candidates grow by the prime factors of the patch side, largest first, then by those of the
    frame count. Among them those nearest to equal steps in log size are taken; a scale may repeat
    when there are more layers than candidates, and gives a linear layer that folds nothing.
    """
    candidates = _candidates(patch_size, frames, channels)
    sizes = [math.log(t * side**2) for t, side, _ in candidates]
    total = math.log(frames * patch_size**2 * channels)
    ideal = [step / num_layers * total for step in range(num_layers + 1)]
    everything = range(len(candidates))
    if num_layers >= len(candidates):
        chosen = [min(everything, key=lambda i: abs(target - sizes[i])) for target in ideal]
    else:

        def cost(picked: tuple[int, ...]) -> float:
            return sum(abs(target - sizes[i]) for target, i in zip(ideal, picked, strict=True))

        chosen = list(min(itertools.combinations(everything, num_layers + 1), key=cost))
    chosen[0] = 0
    chosen[-1] = len(candidates) - 1
    return tuple(candidates[i] for i in chosen)


def fold_shapes(scales: tuple[Scale, ...], width: int) -> tuple[tuple[int, int], ...]:
    """The [out, in] shape of each linear layer; the last one gives `width` channels."""
    shapes: list[tuple[int, int]] = []
    for i, (before, after) in enumerate(itertools.pairwise(scales)):
        folded = (after[0] // before[0]) * (after[1] // before[1]) ** 2
        out = width if i == len(scales) - 2 else after[2]
        shapes.append((out, before[2] * folded))
    return tuple(shapes)


def _candidates(patch_size: int, frames: int, channels: int) -> list[Scale]:
    scales: list[Scale] = [(1, 1, channels)]
    side = 1
    for factor in _prime_factors(patch_size):
        side *= factor
        scales.append((1, side, _pad_to_64(side**2 * channels)))
    t = 1
    for factor in _prime_factors(frames):
        t *= factor
        scales.append((t, side, _pad_to_64(side**2 * channels * t)))
    return scales


def _pad_to_64(num_values: int) -> int:
    return -(-num_values // 64) * 64


def _prime_factors(number: int) -> list[int]:
    """Largest first."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
