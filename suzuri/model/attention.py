"""Attention of one layer: fused projections, conv on keys and values, norms, relative bias.

There is no rotary or other position encoding: positions enter through the bias, the convs,
causality and the length-dependent scale of global layers.
"""

import torch
from torch import Tensor, nn

from suzuri.kernels.attention_prologue import Scaling, Sequences, State, attention_prologue
from suzuri.kernels.paged_attention import paged_attention
from suzuri.kernels.relative_attention import relative_attention
from suzuri.model.batch import Batch
from suzuri.model.config import AttentionConfig
from suzuri.model.linear import Linear, RMSNorm
from suzuri.model.short_conv import ShortConv


class Attention(nn.Module):
    """x [N, D] (after the norm) -> [N, D]. docs/architecture.md 2.4.

    `qkvr` rows: queries, keys, values, then the relative-bias branch. `position_offset` is added to
    a token's position for the length-dependent scale only (a draft depth consumes a later token).
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        hidden_size: int,
        taps: int,
        eps: float,
        layer: int,
        position_offset: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.position_offset = config, layer, position_offset
        self.scaling = None
        if config.log_scaling_n_floor is not None:
            floor, alpha = config.log_scaling_n_floor, config.log_scaling_alpha
            self.scaling = Scaling(floor, alpha, position_offset)
        heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
        self.widths = (heads * channels, 2 * kv_heads * channels, heads * config.d_rel)
        self.qkvr = Linear(hidden_size, sum(self.widths), dtype)
        self.kv_conv = ShortConv(self.widths[1], taps, layer=layer, stream="kv", dtype=dtype)
        self.q_norm = RMSNorm(channels, eps, dtype)
        self.k_norm = RMSNorm(channels, eps, dtype)
        self.rel_proj = nn.Parameter(torch.empty(config.d_rel, config.rel_extent, dtype=dtype))
        self.out = Linear(heads * channels, hidden_size, dtype)

    def forward(self, x_ND: Tensor, batch: Batch) -> Tensor:
        config, starts_S1 = self.config, batch.seq_starts_S1
        state = self._state(batch)
        q_NHC, r_NHB, k_NUC, v_NUC = attention_prologue(
            self.qkvr(x_ND),
            self.kv_conv.weight,
            self.q_norm.weight,
            self.k_norm.weight,
            Sequences(batch.positions_N, batch.seq_ids_N, starts_S1),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            eps=self.q_norm.eps,
            scaling=self.scaling,
            state=state,
            single_rows=batch.single_rows,
        )
        window = config.window
        if state is None or batch.cache is None:
            assert k_NUC is not None and v_NUC is not None
            out_NHC = relative_attention(
                q_NHC, k_NUC, v_NUC, r_NHB, self.rel_proj, starts_S1, window=window
            )
        else:
            pages = (state.k_pages_PTUC, state.v_pages_PTUC)
            view = batch.cache
            table_SM = view.global_pages_SM if window is None else view.local_pages_SM
            where = (table_SM, batch.first_positions_S, starts_S1)
            out_NHC = paged_attention(q_NHC, r_NHB, self.rel_proj, *pages, *where, window=window)
        return self.out(out_NHC.flatten(1))

    def _state(self, batch: Batch) -> State | None:
        view = batch.cache
        if view is None:
            return None
        layer = view.layers[self.layer]
        return State(
            conv_LRC=layer.kv_conv_LRC,
            conv_slots_S=view.conv_slots_S,
            k_pages_PTUC=layer.k_pages_PTUC,
            v_pages_PTUC=layer.v_pages_PTUC,
            page_slots_N=view.global_slots_N if self.config.window is None else view.local_slots_N,
        )
