"""Input builders for embedding_norm."""

from typing import Any

import torch

from suzuri.kernels.embedding import cases as tables

SHAPES = tables.SHAPES
"""Tokens, vocabulary and width, as in embedding."""


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of case `name`."""
    drawn: dict[str, Any] = dict(tables.build(name, dtype, generator))
    shape = (2, drawn["weight_VD"].shape[1])
    norms = 1 + 0.3 * torch.randn(shape, generator=generator, device=generator.device)
    first_D, second_D = norms.to(dtype)
    return drawn | {"first_D": first_D, "second_D": second_D, "eps": 1e-6}
