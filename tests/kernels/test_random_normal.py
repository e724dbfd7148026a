"""random_normal: the distribution, and the same numbers however the range is cut."""

import hashlib
import statistics
import struct

import pytest
import torch

from suzuri.kernels.random_normal import cases, random_normal
from suzuri.kernels.random_normal.reference import quantiles
from tests.kernels.compare import device_cases
from tests.kernels.plain_philox import philox_words


@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_each_number_is_its_own_quantile(device: str, case: str) -> None:
    arguments = cases.build(case)
    values = random_normal(*cases.SHAPES[case], device=device)
    assert values.dtype == torch.float32 and values.shape == (arguments["count"],)
    inverse = statistics.NormalDist().inv_cdf
    for i in range(0, arguments["count"], 1 + arguments["count"] // 50):
        number = arguments["first"] + i
        block, place = divmod(number, 8)
        counter = [block & 0xFFFFFFFF, block >> 32, arguments["stream"], 0]
        word = philox_words(arguments["seed"], counter)[place // 2]
        half = word >> 16 if place % 2 else word & 0xFFFF
        assert values[i].item() == round(inverse((half + 0.5) / 65536) * 2**14) / 2**14


def test_any_cut_gives_the_same_numbers(device: str) -> None:
    whole = random_normal(3, 4, 5, 100, device=device)
    for cut in (1, 2, 3, 8, 11, 64, 99):
        head = random_normal(3, 4, 5, cut, device=device)
        tail = random_normal(3, 4, 5 + cut, 100 - cut, device=device)
        assert torch.equal(torch.cat([head, tail]), whole)


def test_devices_agree(device: str) -> None:
    seed, stream, first, count = cases.SHAPES["large"]
    there = random_normal(seed, stream, first, count, device=device)
    assert torch.equal(there.cpu(), random_normal(seed, stream, first, count))


def test_moments_and_streams() -> None:
    one, other = (random_normal(0, stream, 0, 1 << 20).double() for stream in (0, 1))
    # Standard errors at a million samples: 0.001 for the mean, 0.0014 for the variance.
    assert abs(one.mean().item()) < 0.005 and abs(one.var().item() - 1) < 0.007
    assert abs((one**4).mean().item() - 3) < 0.03
    assert abs((one * other).mean().item()) < 0.005
    assert not torch.equal(one, random_normal(1, 0, 0, 1 << 20).double())
    assert 4 < one.max().item() < 4.5


def test_quantiles_are_those_of_every_platform() -> None:
    table = quantiles()
    assert len(table) == 65536 and list(table) == sorted(table)
    assert all(low == -high for low, high in zip(table, reversed(table), strict=True))
    digest = hashlib.sha256(struct.pack("<65536f", *table)).hexdigest()
    assert digest == "979a9e9c3f1cc4d57d8621763221fc6c79fc9cb3ff35471f12525b1cfb48f664"


@pytest.mark.parametrize(
    "arguments", [(-1, 0, 0, 1), (2**63, 0, 0, 1), (0, 2**32, 0, 1), (0, 0, -1, 1), (0, 0, 0, -1)]
)
def test_arguments_out_of_range(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="random_normal"):
        random_normal(*arguments)
