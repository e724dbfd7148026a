"""Attention of one layer: fused projections, conv on keys and values, norms, relative bias.

There is no rotary or other position encoding: positions enter through the bias, the convs,
causality and the length-dependent scale of global layers.
"""

import torch
from torch import Tensor, nn

from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.log_scaling import log_scaling
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
        heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
        self.widths = (heads * channels, 2 * kv_heads * channels, heads * config.d_rel)
        self.qkvr = Linear(hidden_size, sum(self.widths), dtype)
        self.kv_conv = ShortConv(self.widths[1], taps, layer=layer, stream="kv", dtype=dtype)
        self.q_norm = RMSNorm(channels, eps, dtype)
        self.k_norm = RMSNorm(channels, eps, dtype)
        self.rel_proj = nn.Parameter(torch.empty(config.d_rel, config.rel_extent, dtype=dtype))
        self.out = Linear(heads * channels, hidden_size, dtype)

    def forward(self, x_ND: Tensor, batch: Batch) -> Tensor:
        config, channels = self.config, self.config.head_dim
        q_NX, kv_NX, r_NX = self.qkvr(x_ND).split(self.widths, -1)
        kv_NC = self.kv_conv(kv_NX, batch).reshape(-1, 2, config.num_kv_heads, channels)
        q_NHC = self.q_norm(q_NX.reshape(-1, config.num_heads, channels))
        k_NUC, v_NUC = self.k_norm(kv_NC[:, 0]), kv_NC[:, 1]
        r_NHB = r_NX.reshape(-1, config.num_heads, config.d_rel)
        if config.log_scaling_n_floor is not None:
            offset = self.position_offset
            positions_N = batch.positions_N + offset if offset else batch.positions_N
            scaling = (positions_N, config.log_scaling_n_floor, config.log_scaling_alpha)
            q_NHC, r_NHB = log_scaling(q_NHC, *scaling), log_scaling(r_NHB, *scaling)
        return self.out(self._attend(q_NHC, k_NUC, v_NUC, r_NHB, batch).flatten(1))

    def _attend(
        self, q_NHC: Tensor, k_NUC: Tensor, v_NUC: Tensor, r_NHB: Tensor, batch: Batch
    ) -> Tensor:
        window = self.config.window
        if batch.cache is None:
            return relative_attention(
                q_NHC, k_NUC, v_NUC, r_NHB, self.rel_proj, batch.seq_starts_S1, window=window
            )
        view, layer = batch.cache, batch.cache.layers[self.layer]
        slots_N = view.global_slots_N if window is None else view.local_slots_N
        pages_SM = view.global_pages_SM if window is None else view.local_pages_SM
        kv_write(k_NUC, v_NUC, layer.k_pages_PTUC, layer.v_pages_PTUC, slots_N)
        return paged_attention(
            q_NHC,
            r_NHB,
            self.rel_proj,
            layer.k_pages_PTUC,
            layer.v_pages_PTUC,
            pages_SM,
            batch.first_positions_S,
            batch.seq_starts_S1,
            window=window,
        )
