"""Short convolution of one stream of a layer; its state lives in the batch's cache."""

from typing import Literal

import torch
from torch import Tensor, nn

from suzuri.kernels.residual_norm import residual_norm
from suzuri.kernels.short_conv import short_conv
from suzuri.model.batch import Batch, LayerCache
from suzuri.model.linear import RMSNorm

Stream = Literal["kv", "attn", "mlp"]


class ShortConv(nn.Module):
    """Depthwise causal conv over `channels` with its own residual; weight [channels, taps]."""

    def __init__(
        self, channels: int, taps: int, *, layer: int, stream: Stream, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.stream = layer, stream
        self.weight = nn.Parameter(torch.empty(channels, taps, dtype=dtype))

    def forward(self, x_NC: Tensor, batch: Batch) -> Tensor:
        return short_conv(x_NC, self.weight, *_sequences(batch), **self._memory(batch))

    def joined(
        self, y_ND: Tensor, h_ND: Tensor, norm: RMSNorm, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """(h + forward(y), `norm` of that), both [N, D], in one op."""
        given = (y_ND, h_ND, self.weight, norm.weight, *_sequences(batch))
        return residual_norm(*given, eps=norm.eps, **self._memory(batch))

    def _memory(self, batch: Batch) -> dict[str, Tensor]:
        if batch.cache is None:
            return {}
        state_LRC = self._state(batch.cache.layers[self.layer])
        return {"state_LRC": state_LRC, "slots_S": batch.cache.conv_slots_S}

    def _state(self, cache: LayerCache) -> Tensor:
        if self.stream == "kv":
            return cache.kv_conv_LRC
        return cache.attn_conv_LRC if self.stream == "attn" else cache.mlp_conv_LRC


def _sequences(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.positions_N, batch.seq_ids_N, batch.seq_starts_S1
