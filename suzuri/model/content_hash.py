"""What weights are, in one word: whoever serves them and whoever trained them can compare it."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from suzuri.kernels.block_sums import block_sums


def content_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, dtypes, shapes and bytes, whatever the order in which they come and the device on
    which they are. Equal hashes serve equal bits: a bit that differs, and bytes or tensors in each
    other's places, give another one. Reads memory once (kernels/block_sums.py)."""
    tensors = sorted(named, key=lambda pair: pair[0])
    sums = [block_sums(_words(tensor)) for _, tensor in tensors]  # all asked for before one is read
    found = ContentHash()
    for (name, tensor), sums_B in zip(tensors, sums, strict=True):
        found.add(name, tensor, sums_B)
    return found.text()


class ContentHash:
    """`content_hash` of tensors that are never all there: they come in the order of the names."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, tensor: Tensor, sums_B: Tensor | None = None) -> None:
        """`sums_B`: of the tensor, if they are known."""
        self._digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sums_B = block_sums(_words(tensor)) if sums_B is None else sums_B
        self._digest.update(sums_B.cpu().numpy().data)

    def text(self) -> str:
        return self._digest.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """Its bytes as int32, with zeros up to a whole one; the shape says how many are its own."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if missing := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)
