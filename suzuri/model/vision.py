"""The vision tower: a few linear layers that fold a patch, ever larger squares at a time."""

import torch
from torch import Tensor, nn

from suzuri.kernels.gelu import gelu
from suzuri.model.config import VisionConfig
from suzuri.model.linear import Linear, RMSNorm

EPS = 1e-6
"""The towers' norms have a fixed eps (docs/architecture.md 4.2)."""


class VisionEmbedder(nn.Module):
    """Patches [M, frames, side, side, channels] to features [M, D], one token each.

    Layer i folds (time, height, width) by the ratio of scale i to scale i + 1 into channels (order:
    frame, row, column, channel), then projects; all but the last are normed and pass a GELU.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.scales = config.scales()
        shapes = config.linear_shapes()
        self.linears = nn.ModuleList(Linear(num_in, num_out, dtype) for num_out, num_in in shapes)
        self.norms = nn.ModuleList(RMSNorm(num_out, EPS, dtype) for num_out, _ in shapes[:-1])
        self.final_norm = RMSNorm(config.decoder_dmodel, EPS, dtype)

    def forward(self, patches_MTHWC: Tensor) -> Tensor:
        x = patches_MTHWC.to(self.final_norm.weight.dtype)
        last = len(self.linears) - 1
        for i, linear in enumerate(self.linears):
            x = _fold(x, self.scales[i], self.scales[i + 1])
            shape = x.shape[:-1]
            x = linear(x.flatten(0, -2))
            if i < last:
                x = gelu(self.norms[i](x))
            x = x.unflatten(0, shape)
        return self.final_norm(x.flatten(1))


def _fold(x: Tensor, scale: tuple[int, int, int], following: tuple[int, int, int]) -> Tensor:
    """[M, T, H, W, C], each (t, s, s) block moved into channels ((ti*s + yi)*s + xi)*C + c."""
    t, s = following[0] // scale[0], following[1] // scale[1]
    m, frames, rows, columns, channels = x.shape
    x = x.reshape(m, frames // t, t, rows // s, s, columns // s, s, channels)
    x = x.permute(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(m, frames // t, rows // s, columns // s, t * s * s * channels)
