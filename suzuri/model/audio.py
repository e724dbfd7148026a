"""The audio tower: one embedding row per (mel band, level), summed and normed."""

import torch
from torch import Tensor, nn

from suzuri.kernels.embedding_sum import embedding_sum
from suzuri.model.config import AudioConfig
from suzuri.model.linear import RMSNorm
from suzuri.model.vision import EPS


class BandEmbedding(nn.Module):
    """Holds the table [bands * levels, D]: row band * levels + level."""

    def __init__(self, config: AudioConfig, dtype: torch.dtype) -> None:
        super().__init__()
        rows = config.n_mel_bins * config.mel_vocab_size
        self.weight = nn.Parameter(torch.empty(rows, config.decoder_dmodel, dtype=dtype))


class AudioEmbedder(nn.Module):
    """dMel levels [M, bands] (integers) to features [M, D], one token per frame."""

    def __init__(self, config: AudioConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_bands, self.num_levels = config.n_mel_bins, config.mel_vocab_size
        self.encoder = BandEmbedding(config, dtype)
        self.final_norm = RMSNorm(config.decoder_dmodel, EPS, dtype)

    def forward(self, levels_MB: Tensor) -> Tensor:
        if levels_MB.shape[-1] != self.num_bands:
            raise ValueError(
                f"{levels_MB.shape[-1]} mel bands given, the tower has {self.num_bands}"
            )
        # A level beyond the last would silently read the next band's row. Looking at the values of
        # a GPU tensor would stop the step for it: there they come checked.
        if levels_MB.device.type == "cpu" and levels_MB.numel():
            low, high = int(levels_MB.min()), int(levels_MB.max())
            if low < 0 or high >= self.num_levels:
                raise ValueError(f"audio levels {low}..{high}, must be in 0..{self.num_levels - 1}")
        band_B = torch.arange(self.num_bands, device=levels_MB.device)
        sum_MD = embedding_sum(
            levels_MB.to(torch.int64) + self.num_levels * band_B, self.encoder.weight
        )
        return self.final_norm(sum_MD, out_dtype=self.encoder.weight.dtype)
