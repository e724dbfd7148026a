"""Input builders for paged_attention."""

from itertools import accumulate

import torch
from torch import Tensor

SHAPES = {
    # name: (new rows, context before them) per sequence, heads, KV heads, channels, bias width,
    #       reach, window, page size
    "tiny_global": (((1, 23), (3, 0), (1, 70)), 4, 2, 16, 4, 12, None, 16),
    "tiny_local": (((1, 23), (3, 0), (1, 70)), 4, 4, 16, 4, 8, 8, 16),
    "odd_global": (((2, 5), (9, 130), (1, 0)), 5, 1, 20, 3, 11, None, 7),
    "odd_local": (((2, 5), (9, 130), (1, 0)), 3, 3, 12, 3, 7, 7, 7),
    "inkling_decode_global": (((1, 8191),) * 8, 64, 8, 128, 16, 1024, None, 128),
    "inkling_decode_local": (((1, 8191),) * 8, 64, 16, 128, 16, 512, 512, 128),
    "inkling_verify_global": (((9, 8183),) * 8, 64, 8, 128, 16, 1024, None, 128),
}


def build(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor | int | None]:
    """Arguments of case `name`: a shuffled page table over a pool with spare, finite pages."""
    seqs, heads, kv_heads, channels, width, reach, window, size = SHAPES[name]
    device, total = generator.device, sum(rows for rows, _ in seqs)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device=device)).to(dtype)

    pages_per_seq = max(-(-(rows + before) // size) for rows, before in seqs)
    num_pages = pages_per_seq * len(seqs) + 3
    order = torch.randperm(num_pages, generator=generator, device=device)
    return {
        "q_NHC": normal(total, heads, channels, scale=channels**0.5),
        "r_NHB": normal(total, heads, width),
        "proj_BE": normal(width, reach),
        "k_pages_PTUC": normal(num_pages, size, kv_heads, channels),
        "v_pages_PTUC": normal(num_pages, size, kv_heads, channels),
        "page_table_SM": order[: pages_per_seq * len(seqs)].view(len(seqs), pages_per_seq),
        "first_positions_S": torch.tensor([before for _, before in seqs], device=device),
        "seq_starts_S1": torch.tensor([0, *accumulate(rows for rows, _ in seqs)], device=device),
        "window": window,
    }
