"""philox against the known answers of Random123, and against Python's own integers."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.philox import cases, philox
from tests.kernels.compare import Arguments, device_cases, generator
from tests.kernels.plain_philox import philox_words

# philox4x32-10 of Random123's kat_vectors: counter words, key words, answer.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["0", "f", "pi"])
def test_known_answers(device: str, counter: str, key: str, answer: str):
    low, high = words(key)
    seed = signed(high << 32 | low)
    tensors = [torch.tensor(value, device=device) for value in (seed, *words(counter))]
    seed_tensor, c0, c1, c2, c3 = tensors
    assert [int(word) for word in philox(seed_tensor, c0, c1, c2, c3)] == words(answer)
    assert philox_words(seed, words(counter)) == words(answer)


def sample(arguments: Arguments, out: tuple[Tensor, ...]) -> None:
    """Compares up to 500 elements spread over the result."""
    given = torch.broadcast_tensors(*(arguments[name] for name in ("seed", "c0", "c1", "c2", "c3")))
    flat = [x.reshape(-1) for x in given]
    count = flat[0].numel()
    for index in range(0, count, max(1, count // 500)):
        seed, *counter = (int(x[index]) for x in flat)
        assert [int(word.reshape(-1)[index]) for word in out] == philox_words(seed, counter), index


@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_unbounded_integers(device: str, case: str):
    arguments: Arguments = cases.build(case, torch.float32, generator(1, device))
    out = philox(**arguments)
    rows, columns = cases.SHAPES[case]
    for word in out:
        assert (word.shape, word.dtype) == ((rows, columns), torch.int64)
        assert word.min() >= 0
        assert word.max() < 2**32
    sample(arguments, out)


def test_negative_seeds_and_extreme_counters(device: str):
    values = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1], device=device)
    arguments: Arguments = {
        "seed": torch.tensor([-(2**63), -1, 0, 2**63 - 1], device=device)[:, None],
        "c0": values,
        "c1": values.flip(0),
        "c2": values[:1],
        "c3": values[4:],
    }
    sample(arguments, philox(**arguments))


def test_every_bit_of_the_input_matters(device: str):
    """One bit of the key or of the counter flips about half of the output bits."""
    zero = torch.zeros(32, dtype=torch.int64, device=device)
    bit = 1 << torch.arange(32, device=device)
    base = philox(*[zero] * 5)
    for place in range(6):
        inputs = [zero] * 5
        inputs[max(place - 1, 0)] = bit << 32 if place == 1 else bit
        flipped = [a ^ b for a, b in zip(philox(*inputs), base, strict=True)]
        counts = [sum(int(word[i]).bit_count() for word in flipped) for i in range(32)]
        assert all(30 < count < 98 for count in counts), (place, counts)


@pytest.mark.gpu
def test_words_are_those_of_triton():
    pytest.importorskip("triton")
    from suzuri.kernels import dispatch
    from tests.kernels.triton_philox import triton_philox

    arguments: Arguments = cases.build("tiny", torch.float32, generator(2, "cuda"))
    with dispatch.force("reference"):
        ours = philox(**arguments)
    for a, b in zip(ours, triton_philox(**arguments), strict=True):
        assert torch.equal(a, b)
