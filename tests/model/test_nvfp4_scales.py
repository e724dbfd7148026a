"""Global scales as divisors: exact, or refused."""

import pytest
import torch

from suzuri.model.nvfp4_scales import divisor_of, multiplier_of


def test_powers_of_two_are_exact_both_ways() -> None:
    for exponent in range(-100, 91):
        scale = torch.tensor([2.0**exponent])
        divisor = divisor_of(scale, "x")
        assert divisor.item() == 2.0**-exponent
        assert torch.equal(multiplier_of(divisor), scale)


def test_other_scales_keep_every_value_or_are_refused() -> None:
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(300, generator=generator) + 1
    kept = 0
    for scale in scales:
        try:
            back = multiplier_of(divisor_of(scale.reshape(1), "x"))
        except ValueError:
            continue
        kept += 1
        # Every product of a code and a block scale has at most six significant bits.
        for bits in range(32, 64):
            product = torch.tensor(float(bits))
            assert (product * back).bfloat16() == (product * scale).bfloat16()
    assert kept > 290


def test_scale_that_no_divisor_gives_is_named() -> None:
    # 7 times a six-bit number lies half-way between two bf16 numbers, and 1 / (1 / 7) is not 7.
    with pytest.raises(ValueError, match=r"w2, expert 5: no divisor .* 0\.000213623046875 exactly"):
        divisor_of(torch.tensor([7 * 2.0**-15]), "w2, expert 5")


@pytest.mark.parametrize("scale", [5.7629171351436526e-05, 0.00011003934196196496])
def test_the_divisor_beside_the_nearest_is_found(scale: float) -> None:
    """The inverse of the nearest divisor changes a value, that of a neighbour does not."""
    wanted = torch.tensor([scale])
    nearest = 1 / wanted
    found = divisor_of(wanted, "x")
    assert found != nearest
    products = torch.arange(1.0, 2689.0)  # all products of codes and block scales, scaled, and more
    products = products[torch.tensor([(int(p) & -int(p)) * 64 > int(p) for p in products])]
    kept = (products * wanted).bfloat16()
    assert torch.equal((products * multiplier_of(found)).bfloat16(), kept)
    assert not torch.equal((products * multiplier_of(nearest)).bfloat16(), kept)
