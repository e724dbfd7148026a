"""The tensors behind the pools: pages and conv rings of all layers, and resume-point snapshots.

Layers of one kind lie in one tensor, so that copying a page or a slot is a few operations whatever
the depth of the model; the model sees views of it (model/batch.py, LayerCache).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from suzuri.engine.transfers import upload
from suzuri.model.batch import LayerCache
from suzuri.model.config import AttentionConfig

POOLS = ("global", "local")


class StackCache:
    """State of one stack of layers (the decoder, or the draft depths).

    `pages`: sizes of the pools "global" and "local", page 0 included; `slots` and `snapshots`: how
    many of each, 0 included. `ring` rows per conv slot, at least taps + 1.
    """

    def __init__(
        self,
        attentions: Sequence[AttentionConfig],
        *,
        hidden_size: int,
        taps: int,
        page_size: int,
        pages: dict[str, int],
        slots: int,
        snapshots: int,
        ring: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.taps, self.ring = taps, ring

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.kv: dict[str, tuple[Tensor, Tensor]] = {}
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        kv_rings: dict[str, Tensor] = {}
        for name in POOLS:
            held = [a for a in attentions if a.is_local == (name == "local")]
            heads, channels = (held[0].num_kv_heads, held[0].head_dim) if held else (0, 0)
            shape = (len(held), pages[name] if held else 0, page_size, heads, channels)
            self.kv[name] = (zeros(*shape), zeros(*shape))
            width = 2 * heads * channels
            kv_rings[name] = self._rings(zeros, len(held), slots, snapshots, width)
        count = len(attentions)
        attn = self._rings(zeros, count, slots, snapshots, hidden_size)
        mlp = self._rings(zeros, count, slots, snapshots, hidden_size)
        self.layers: list[LayerCache] = []
        seen = dict.fromkeys(POOLS, 0)
        for layer, attention in enumerate(attentions):
            name = "local" if attention.is_local else "global"
            index = seen[name]
            seen[name] += 1
            self.layers.append(
                LayerCache(
                    k_pages_PTUC=self.kv[name][0][index],
                    v_pages_PTUC=self.kv[name][1][index],
                    kv_conv_LRC=kv_rings[name][index],
                    attn_conv_LRC=attn[layer],
                    mlp_conv_LRC=mlp[layer],
                )
            )

    def _rings(
        self, zeros: Callable[..., Tensor], layers: int, slots: int, snapshots: int, width: int
    ) -> Tensor:
        live = zeros(layers, slots, self.ring, width)
        self._live.append(live)
        self._kept.append(zeros(layers, snapshots, self.taps, width))
        return live

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        tensors = [*self._live, *self._kept, *(t for pair in self.kv.values() for t in pair)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def copy_pages(self, copies: Iterable[tuple[str, int, int]]) -> None:
        """(pool, source, destination): all rows of a page, in every layer."""
        for name in POOLS:
            pairs = [(source, target) for pool, source, target in copies if pool == name]
            if not pairs:
                continue
            assert len({target for _, target in pairs}) == len(pairs), (
                f"{name}: two copies into one"
            )
            index_2M = upload(pairs, self.kv[name][0].device).T
            for pages in self.kv[name]:
                pages[:, index_2M[1]] = pages[:, index_2M[0]]

    def snapshot(self, items: Sequence[tuple[int, int, int]]) -> None:
        """(slot, snapshot, length): keep the conv inputs of the `taps` tokens before `length`."""
        places = [
            (slot, position % self.ring, kept, position % self.taps)
            for slot, kept, length in items
            for position in range(max(0, length - self.taps), length)
        ]
        if not places:
            return
        slot_M, row_M, kept_M, kept_row_M = upload(places, self._live[0].device).T
        for live, kept in zip(self._live, self._kept, strict=True):
            kept[:, kept_M, kept_row_M] = live[:, slot_M, row_M]

    def restore(self, items: Sequence[tuple[int, int, int]]) -> None:
        """(snapshot, slot, length): the taps - 1 inputs before `length` go back into a slot.

        The snapshot may be that of `length` or of one token more: it has those rows either way.
        """
        places = [
            (slot, position % self.ring, kept, position % self.taps)
            for kept, slot, length in items
            for position in range(max(0, length - self.taps + 1), length)
        ]
        if not places:
            return
        slot_M, row_M, kept_M, kept_row_M = upload(places, self._live[0].device).T
        for live, kept in zip(self._live, self._kept, strict=True):
            live[:, slot_M, row_M] = kept[:, kept_M, kept_row_M]
