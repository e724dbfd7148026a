"""What weights are, in one word: whoever serves them and whoever trained them can compare it."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def content_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, dtypes, shapes and bytes, whatever the order. Equal hashes serve equal bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous()
        digest.update(data.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
