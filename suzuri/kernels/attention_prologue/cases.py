"""Input builders for attention_prologue."""

from typing import Any

import torch
from torch import Tensor

from suzuri.kernels.short_conv import cases as convs

SHAPES = {
    # name: (case of short_conv for the sequences, heads, KV heads, channels, relative width)
    "tiny": ("tiny", 4, 2, 16, 4),
    "odd": ("odd", 6, 3, 5, 3),
    "one_tap": ("one_tap", 2, 2, 8, 2),
    "inkling_local": ("inkling_kv_local", 64, 16, 128, 16),
    "inkling_small_local": ("inkling_small_kv_local", 32, 8, 128, 16),
}
PAGE_SIZE = 4


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of case `name`, without scaling and state."""
    sequences, heads, kv_heads, channels, width = SHAPES[name]
    drawn = convs.build(sequences, dtype, generator)
    rows, taps = drawn["x_NC"].shape[0], drawn["weight_CK"].shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)

    return {
        "qkvr_NX": normal(rows, heads * (channels + width) + 2 * kv_heads * channels),
        "conv_CK": normal(2 * kv_heads * channels, taps),
        "q_norm_C": 1 + 0.3 * normal(channels),
        "k_norm_C": 1 + 0.3 * normal(channels),
        "sequences": (drawn["positions_N"], drawn["seq_ids_N"], drawn["seq_starts_S1"]),
        "heads": heads,
        "kv_heads": kv_heads,
        "eps": 1e-6,
    }


def memory(arguments: dict[str, Any], spare: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Fields of a State for these arguments: random old contents, `spare` more rows in the ring
    than taps - 1, one row without a page slot."""
    qkvr_NX, conv_CK = arguments["qkvr_NX"], arguments["conv_CK"]
    rows, dtype, device = qkvr_NX.shape[0], qkvr_NX.dtype, generator.device
    num_seqs = arguments["sequences"][2].shape[0] - 1
    ring, pages = conv_CK.shape[1] - 1 + spare, rows // PAGE_SIZE + 2
    channels = arguments["q_norm_C"].shape[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[:rows]
    slots[rows // 2] = -1
    return {
        "conv_LRC": normal(num_seqs + 1, ring, conv_CK.shape[0]),
        "conv_slots_S": torch.randperm(num_seqs + 1, generator=generator, device=device)[:num_seqs],
        "k_pages_PTUC": normal(pages, PAGE_SIZE, arguments["kv_heads"], channels),
        "v_pages_PTUC": normal(pages, PAGE_SIZE, arguments["kv_heads"], channels),
        "page_slots_N": slots,
    }
