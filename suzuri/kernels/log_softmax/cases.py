"""Input builders for log_softmax."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, vocabulary)
    "tiny": (9, 301),
    "odd": (5, 4099),
    "inkling": (4, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`; one id is masked."""
    rows, vocabulary = SHAPES[name]
    logits = 3 * torch.randn(rows, vocabulary, generator=generator, device=generator.device)
    logits[0, 1] = float("-inf")
    return {"logits_NV": logits.to(dtype)}
