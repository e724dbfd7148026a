"""Input builders for kv_write."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, KV heads, channels, pages, page size)
    "tiny": (9, 2, 16, 5, 4),
    "odd": (5, 3, 7, 3, 3),
    "inkling_global": (64, 8, 128, 32, 128),
    "inkling_local": (64, 16, 128, 32, 128),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`; one row has no slot."""
    rows, kv_heads, channels, pages, size = SHAPES[name]
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    slots = torch.randperm(pages * size, generator=generator, device=device)[:rows]
    slots[rows // 2] = -1
    return {
        "k_NUC": normal(rows, kv_heads, channels),
        "v_NUC": normal(rows, kv_heads, channels),
        "k_pages_PTUC": normal(pages, size, kv_heads, channels),
        "v_pages_PTUC": normal(pages, size, kv_heads, channels),
        "slots_N": slots,
    }
