"""State tensors of a stack of layers, and the plainest way to hand them out: every sequence owns a
run of pages and one conv slot. The engine allocates pages its own way over the same tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from suzuri.model.batch import CacheView, LayerCache
from suzuri.model.config import AttentionConfig, ModelConfig


def layer_caches(
    attentions: Sequence[AttentionConfig],
    *,
    hidden_size: int,
    num_pages: int,
    page_size: int,
    num_slots: int,
    ring: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[LayerCache, ...]:
    """Zeroed state of each layer (unused pages must hold finite values).

    `ring` rows per conv slot: at least taps - 1, plus the tokens that may have to be undone.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return tuple(
        LayerCache(
            k_pages_PTUC=zeros(num_pages, page_size, a.num_kv_heads, a.head_dim),
            v_pages_PTUC=zeros(num_pages, page_size, a.num_kv_heads, a.head_dim),
            kv_conv_LRC=zeros(num_slots, ring, 2 * a.num_kv_heads * a.head_dim),
            attn_conv_LRC=zeros(num_slots, ring, hidden_size),
            mlp_conv_LRC=zeros(num_slots, ring, hidden_size),
        )
        for a in attentions
    )


def decoder_attentions(config: ModelConfig) -> list[AttentionConfig]:
    """Attention of every decoder layer, in order."""
    return [config.text.attention(layer) for layer in range(config.text.num_hidden_layers)]


def draft_attentions(config: ModelConfig) -> list[AttentionConfig]:
    """Attention of every draft depth, in order."""
    return [config.depth_attention(d) for d in range(config.mtp.num_nextn_predict_layers)]


class SequenceCache:
    """State for a fixed number of sequences of bounded length; nothing is shared or evicted.

    Sequence s owns pages `page_order[s * pages : (s + 1) * pages]`. `undo` tokens at the end of a
    sequence can be taken back by continuing from an earlier position.
    """

    def __init__(
        self,
        config: ModelConfig,
        attentions: Sequence[AttentionConfig],
        *,
        num_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = 128,
        undo: int = 0,
        page_order: Sequence[int] | None = None,
    ) -> None:
        pages = -(-max_tokens // page_size)
        order = list(page_order) if page_order is not None else list(range(num_sequences * pages))
        assert len(order) == num_sequences * pages, (
            f"{len(order)} pages for {num_sequences} x {pages}"
        )
        self.max_tokens, self.page_size = max_tokens, page_size
        self._pages = [order[s * pages : (s + 1) * pages] for s in range(num_sequences)]
        self.pages_SM = torch.tensor(order, device=device).view(num_sequences, pages)
        self.layers = layer_caches(
            attentions,
            hidden_size=config.text.hidden_size,
            num_pages=max(order) + 1,
            page_size=page_size,
            num_slots=num_sequences,
            ring=max(config.text.sconv_kernel_size - 1 + undo, 1),
            dtype=dtype,
            device=device,
        )

    def view(
        self, sequences: Sequence[int], first_positions: Sequence[int], lengths: Sequence[int]
    ) -> CacheView:
        """The view for a batch that appends lengths[i] tokens to sequences[i] from its position.

        Raises ValueError when a sequence would outgrow `max_tokens`.
        """
        device = self.pages_SM.device
        for first, length in zip(first_positions, lengths, strict=True):
            if first + length > self.max_tokens:
                raise ValueError(f"{first + length} tokens in a cache of {self.max_tokens}")
        slots_S = torch.tensor(list(sequences), dtype=torch.int64, device=device)
        slots = [
            self._pages[s][p // self.page_size] * self.page_size + p % self.page_size
            for s, first, length in zip(sequences, first_positions, lengths, strict=True)
            for p in range(first, first + length)
        ]
        slots_N = torch.tensor(slots, dtype=torch.int64, device=device)
        return CacheView(
            layers=self.layers,
            global_pages_SM=self.pages_SM[slots_S],
            local_pages_SM=self.pages_SM[slots_S],
            global_slots_N=slots_N,
            local_slots_N=slots_N,
            conv_slots_S=slots_S,
        )
