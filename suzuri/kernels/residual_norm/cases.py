"""Input builders for residual_norm."""

from typing import Any

import torch

from suzuri.kernels.short_conv import cases as convs

SHAPES = {name: shape for name, shape in convs.SHAPES.items() if "kv" not in name}
"""Sequence lengths, channels and taps, as in short_conv."""


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of case `name`, without state: fresh sequences."""
    drawn = convs.build(name, dtype, generator)
    y_ND, device = drawn.pop("x_NC"), generator.device
    norm_D = 1 + 0.3 * torch.randn(y_ND.shape[1], generator=generator, device=device)
    return {
        "y_ND": y_ND,
        "h_ND": 2 * torch.randn(y_ND.shape, generator=generator, device=device).to(dtype),
        "conv_DK": drawn.pop("weight_CK"),
        "norm_D": norm_D.to(dtype),
        **drawn,
        "eps": 1e-6,
    }
