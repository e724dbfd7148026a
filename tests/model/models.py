"""Models and expected values that several test files share."""

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.config import ModelConfig, preset
from suzuri.model.inkling import PARTS, Inkling, randomize
from suzuri.model.weights import load_weights

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = ("base", "narrow", "chain", "odd", "alldense", "wide")


@functools.cache
def golden_model(case: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Inkling:
    """The checkpoint of a golden case. Shared: a test that changes it must copy it first."""
    folder = GOLDEN / case / "original"
    model = Inkling(ModelConfig.from_file(folder), dtype=dtype, device=device)
    load_weights(model, folder, want=PARTS)
    return model.requires_grad_(False)


@functools.cache
def expected(case: str) -> dict[str, Tensor]:
    """The expected values of a golden case."""
    return load_file(GOLDEN / case / "expected.safetensors")


def random_model(name: str = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0) -> Inkling:
    """A preset with random weights, none at a default."""
    model = Inkling(preset(name), dtype=dtype)
    randomize(model, seed)
    return model


def random_ids(model: Inkling, count: int, seed: int = 0) -> list[int]:
    """Model rows of real tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.text.unpadded_vocab_size
    return [int(i) for i in torch.randint(vocabulary, (count,), generator=generator)]


def run_in_chunks(
    model: Inkling, ids: list[int], chunks: list[int], page_size: int = 128, undo: int = 0
) -> Tensor:
    """Hidden rows of one sequence given piece by piece to a cache; the pages are shuffled."""
    assert sum(chunks) == len(ids)
    pages = -(-len(ids) // page_size)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(len(ids))).tolist()
    weight = model.decoder.norm.weight
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=2,
        max_tokens=len(ids),
        dtype=weight.dtype,
        device=weight.device,
        page_size=page_size,
        undo=undo,
        page_order=order,
    )
    parts: list[Tensor] = []
    first = 0
    for length in chunks:
        piece = ids[first : first + length]
        view = cache.view([1], [first], [length])
        batch = pack([piece], first_positions=[first], cache=view, device=weight.device)
        parts.append(model.decoder(batch))
        first += length
    return torch.cat(parts)
