"""The hash of weights: every bit, byte, name and place counts, and nothing else does."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suzuri.kernels import block_sums as block_module
from suzuri.kernels.block_sums import BLOCK, block_sums, keys
from suzuri.model.content_hash import content_hash

ROOT = Path(__file__).parents[2]


def weights() -> dict[str, Tensor]:
    """Shapes that end within a word, a block and at their borders."""
    drawn = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (BLOCK * 2,), "c": (BLOCK, 3), "d": (1,), "e": (), "f": (0, 4)}
    found = {
        name: torch.randn(shape, generator=drawn).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    found["g"] = torch.arange(7, dtype=torch.uint8)
    found["h"] = torch.randn(33, generator=drawn, dtype=torch.float64)
    return found


def one_bit_other(named: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Copies with a bit flipped: of the first, the last and some bytes in between."""
    for name, tensor in named.items():
        size = tensor.numel() * tensor.element_size()
        for place in sorted({0, size // 3, size // 2, size - 1} & set(range(size))):
            for bit in (1, 128):
                other = tensor.clone()
                data = other.flatten().view(torch.uint8) if other.dim() else other.view(1)
                data.view(torch.uint8)[place] ^= bit
                yield {**named, name: other}


def test_every_bit_counts() -> None:
    plain = content_hash(weights().items())
    found = [content_hash(other.items()) for other in one_bit_other(weights())]
    assert len(found) > 40 and plain not in found
    assert len(set(found)) == len(found)


def test_names_dtypes_and_shapes_count_and_the_order_does_not() -> None:
    named = weights()
    plain = content_hash(named.items())
    assert content_hash(reversed(list(named.items()))) == plain
    others = [
        {**named, "a": named["a"].view(torch.int16)},
        {**named, "a": named["a"].view(5, 3)},
        {**named, "f": named["f"].view(4, 0)},
        {**{name: x for name, x in named.items() if name != "f"}},
        {**{name: x for name, x in named.items() if name != "a"}, "a2": named["a"]},
        {**named, "b": named["b"].view(2, BLOCK), "c": named["c"]},
    ]
    found = [content_hash(other.items()) for other in others]
    assert plain not in found and len(set(found)) == len(found)


def test_what_stands_elsewhere_is_something_else() -> None:
    """Bytes, words, blocks and tensors in each other's places."""
    named = {"a": torch.arange(4 * BLOCK, dtype=torch.int32), "b": torch.ones(4, dtype=torch.int32)}
    named["c"] = named["b"] * 2
    swapped = [named["a"].clone() for _ in range(4)]
    swapped[0][[0, 1]] = swapped[0][[1, 0]]
    swapped[1][[5, BLOCK + 5]] = swapped[1][[BLOCK + 5, 5]]
    swapped[2] = swapped[2].view(4, BLOCK)[[1, 0, 2, 3]].flatten()
    data = swapped[3].view(torch.uint8)
    data[[4, 5]] = data[[5, 4]]
    others = [{**named, "a": other} for other in swapped]
    others.append({**named, "b": named["c"], "c": named["b"]})
    hashes = [content_hash(other.items()) for other in [named, *others]]
    assert len(set(hashes)) == len(hashes)


def test_two_words_in_each_others_places_are_noticed_for_certain() -> None:
    """Odd keys with low halves that all differ: no difference of two of them and of two words
    multiplies to 0 modulo 2^64. The worst words differ in their top bit alone."""
    low = [key % 2**32 for key in keys(torch.device("cpu")).tolist()]
    assert len(set(low)) == BLOCK and all(key % 2 for key in low)
    words = torch.zeros(BLOCK, dtype=torch.int32)
    words[: BLOCK // 2] = -(2**31)
    before = block_sums(words)
    for i in range(0, BLOCK // 2, 97):
        other = words.clone()
        other[[i, BLOCK - 1 - i]] = other[[BLOCK - 1 - i, i]]
        assert not torch.equal(block_sums(other), before)


@pytest.mark.parametrize("loops", [True, False], ids=["loops", "tensors"])
def test_sums_are_those_of_plain_integers(loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors (as on a GPU) in one chunk of blocks and in several."""
    if not loops:
        monkeypatch.setattr(block_module, "has_loops", lambda: False)
        monkeypatch.setattr(block_module, "CHUNK", 3)
    drawn, key = torch.Generator().manual_seed(1), keys(torch.device("cpu")).tolist()
    for count in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 5 * BLOCK + 1, 9 * BLOCK + 5):
        words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=drawn)
        expected = [
            sum(w * k for w, k in zip(part.tolist(), key, strict=False))
            for part in words.split(BLOCK)
            if part.numel()
        ]
        found = [total % 2**64 for total in block_sums(words).tolist()]
        assert found == [total % 2**64 for total in expected]


def test_another_layout_in_memory_is_the_same_content() -> None:
    plain = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    apart = torch.empty(48, 64).t()
    apart.copy_(plain)
    assert not apart.is_contiguous()
    wide = torch.zeros(100, dtype=torch.uint8)
    at_odd = wide[3:40].copy_(torch.arange(37, dtype=torch.uint8))
    assert content_hash([("x", apart)]) == content_hash([("x", plain)])
    assert content_hash([("x", at_odd)]) == content_hash([("x", at_odd.clone())])


def test_threads_and_processes_change_nothing() -> None:
    """A number written down, so that it is also the same on every machine."""
    count = 5 << 20  # enough to be shared out
    words = torch.arange(count, dtype=torch.int64).mul_(2654435761).to(torch.int32)
    expected = "968233116e3b98010ae133cc0a676857"
    assert content_hash([("x", words)]) == expected
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from suzuri.model.content_hash import content_hash\n"
        f"x = torch.arange({count}, dtype=torch.int64).mul_(2654435761).to(torch.int32)\n"
        "print(content_hash([('x', x)]))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == expected


def test_halves_that_are_added_are_the_sums() -> None:
    """What runs where there is no compiled loop."""
    words = torch.arange(-BLOCK, BLOCK, dtype=torch.int32).mul_(7919)
    products = words.view(2, BLOCK) * keys(words.device)
    assert torch.equal(block_module._halved(products), block_sums(words))


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    named = weights()
    named["big"] = torch.randn(3_000_001)
    there = {name: tensor.cuda() for name, tensor in named.items()}
    assert content_hash(there.items()) == content_hash(named.items())
