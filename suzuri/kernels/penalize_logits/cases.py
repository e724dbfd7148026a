"""Input builders for penalize_logits."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, slots, vocabulary)
    "tiny": (9, 12, 301),
    "odd": (5, 3, 37),
    "inkling": (8, 16, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`: row 0 without penalties, one masked id, tables a third full."""
    rows, slots, vocabulary = SHAPES[name]
    device = generator.device
    logits = 3 * torch.randn(rows, vocabulary, generator=generator, device=device)
    logits[:, 5] = -torch.inf
    size = (slots, vocabulary)
    seen = torch.randint(3, size, generator=generator, device=device) == 0
    counts = torch.randint(-8, 5, size, generator=generator, device=device).clamp(min=0)
    repetition, frequency, presence = torch.rand(3, rows, generator=generator, device=device)
    repetition = 0.5 + repetition
    repetition[0], frequency[0], presence[0] = 1.0, 0.5, 0.5  # below: 0 and 0
    return {
        "logits_NV": logits.to(dtype),
        "prompt_LV": seen,
        "output_LV": counts.to(torch.int32),
        "slots_N": torch.randint(slots, (rows,), generator=generator, device=device),
        "repetition_N": repetition,
        "frequency_N": 2 * frequency - 1,
        "presence_N": 2 * presence - 1,
    }
