"""Input builders for filter_logits."""

import torch
from torch import Tensor

SHAPES = {
    # name: (rows, vocabulary)
    "tiny": (9, 301),
    "odd": (6, 37),
    "inkling": (8, 200058),
}


def build(name: str, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Arguments of case `name`: row 0 has no filter, row 1 only min_p, row 2 only top_k, row 3 only
    top_p, the others all three; many ties (logits are rounded), one id masked."""
    rows, vocabulary = SHAPES[name]
    device = generator.device
    logits = (16 * torch.randn(rows, vocabulary, generator=generator, device=device)).to(
        torch.int64
    ) / 8
    logits[:, 5] = -torch.inf
    uniform = torch.rand(2, rows, generator=generator, device=device)
    min_p, top_p = 0.1 * uniform[0], 0.5 + uniform[1] / 2
    top_k = torch.randint(1, 1 + vocabulary // 2, (rows,), generator=generator, device=device)
    min_p[[0, 2, 3]] = 0.0
    top_k[[0, 1, 3]] = torch.tensor([0, -1, 0], device=device)
    top_p[[0, 1, 2]] = 1.0
    return {
        "logits_NV": logits.to(dtype),
        "min_p_N": min_p,
        "top_k_N": top_k,
        "top_p_N": top_p,
    }
