"""Sequences that live in a shared pool of pages and are attended to piece by piece, as an engine
does it, with the nastiest contents that the contract allows wherever no row may look.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.paged_attention import paged_attention
from tests.kernels.compare import generator

GARBAGE_PAGES = (2**40, -7, -1, 2**31)
SPARE_PAGES = 3


class Rows(NamedTuple):
    """One whole sequence: q [T, H, C], k and v [T, U, C], r [T, H, B]."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor


def random_rows(
    length: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    channels: int = 8,
    width: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> Rows:
    g = generator(seed, device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=g, device=device)

    q = normal(heads, channels) * channels**0.5
    k, v = normal(kv_heads, channels), normal(kv_heads, channels)
    return Rows(q.to(dtype), k.to(dtype), v.to(dtype), normal(heads, width).to(dtype))


def random_proj(reach: int, like: Rows) -> Tensor:
    device = like.r.device
    g = generator(reach, str(device))
    return torch.randn(like.r.shape[-1], reach, generator=g, device=device).to(like.r.dtype)


class Pool:
    """Pages, page tables and positions of several sequences.

    Unused and freed pages hold the largest finite value; table entries of pages not yet allocated,
    or wholly out of the window, hold page ids that do not exist.
    """

    def __init__(
        self, sequences: Sequence[Rows], proj: Tensor, window: int | None, page_size: int
    ) -> None:
        self.sequences, self.proj, self.window, self.size = sequences, proj, window, page_size
        self.done = [0] * len(sequences)
        k, device = sequences[0].k, sequences[0].k.device
        per_sequence = [-(-len(rows.q) // page_size) for rows in sequences]
        num_pages = sum(per_sequence) + SPARE_PAGES
        shape = (num_pages, page_size, *k.shape[1:])
        self.k_pages = torch.full(shape, torch.finfo(k.dtype).max, dtype=k.dtype, device=device)
        self.v_pages = -self.k_pages
        self.free = torch.randperm(num_pages, generator=generator(1)).tolist()
        columns = max(per_sequence) + 2
        garbage = [
            [GARBAGE_PAGES[(s + m) % len(GARBAGE_PAGES)] for m in range(columns)]
            for s in range(len(sequences))
        ]
        self.table = torch.tensor(garbage, device=device)

    def step(self, lengths: Sequence[int]) -> list[Tensor]:
        """Writes and runs the next lengths[s] rows of each sequence in one batch."""
        ends = [done + n for done, n in zip(self.done, lengths, strict=True)]
        slots = [
            self._slot(s, position)
            for s, (done, end) in enumerate(zip(self.done, ends, strict=True))
            for position in range(done, end)
        ]
        new = [
            Rows(*(x[done:end] for x in rows))
            for rows, done, end in zip(self.sequences, self.done, ends, strict=True)
        ]
        q, k, v, r = (torch.cat(parts) for parts in zip(*new, strict=True))
        device = q.device
        kv_write(k, v, self.k_pages, self.v_pages, torch.tensor(slots, device=device))
        starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        first = torch.tensor(self.done, device=device)
        out = paged_attention(
            *(q, r, self.proj, self.k_pages, self.v_pages, self.table, first, starts),
            window=self.window,
        )
        self.done = ends
        self._free_what_slid_out()
        return list(out.split(list(lengths)))

    def run(self, *steps: Sequence[int]) -> list[Tensor]:
        """Several steps; per sequence, its outputs in one tensor."""
        outputs = [self.step(lengths) for lengths in steps]
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def _slot(self, sequence: int, position: int) -> int:
        column, offset = divmod(position, self.size)
        if offset == 0:
            self.table[sequence, column] = self.free.pop()
        return int(self.table[sequence, column]) * self.size + offset

    def _free_what_slid_out(self) -> None:
        if self.window is None:
            return
        for s, done in enumerate(self.done):
            for column in range(max(done - self.window + 1, 0) // self.size):
                page = int(self.table[s, column])
                if 0 <= page < len(self.k_pages):
                    self.k_pages[page] = torch.finfo(self.k_pages.dtype).max
                    self.v_pages[page] = torch.finfo(self.k_pages.dtype).min
                    self.table[s, column] = GARBAGE_PAGES[column % len(GARBAGE_PAGES)]
