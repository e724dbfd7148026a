"""Draws one token per row straight from hidden states, without the [N, V] logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.draw_tokens import reference
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.sample_tokens import PURPOSE_SAMPLE

MOST_ROWS = 4096
"""Rows of one turn: so many logits of one chunk of the vocabulary fill the buffer."""
RAW, SAMPLED = 1, 2
"""Bits of `wants_N`."""


class Drawn(NamedTuple):
    """ids_N [N] int64; raw_N and sampled_N [N] in the dtype of the logits, None without wants."""

    ids_N: Tensor
    raw_N: Tensor | None
    sampled_N: Tensor | None


def draw_tokens(
    h_ND: Tensor,
    unembed_VD: Tensor,
    draws: Draws | None = None,
    wants_N: Tensor | None = None,
    *,
    scale: float,
    purpose: int = PURPOSE_SAMPLE,
) -> Drawn:
    """The draw of `sample_tokens` from the logits h @ unembed^T * scale, and its log-probs.

    h_ND [N, D] after the final norm, unembed_VD [V, D] real vocabulary rows only, one dtype
    (ValueError otherwise); draws: None for the most likely id of every row, lowest on ties;
    wants_N int64 [N] or None: bits of the log-probs that a row asks for, RAW (log-softmax of the
    logits) and SAMPLED (of logits / temperature; 0 of a row without noise, whose draw is certain);
    NaN where it does not. A row without an answer (NaN or infinity among its logits, or all of them
    -inf) gives -1 and NaN. No gradients.

    The vocabulary is walked in slices of whole chunks of 2048 ids, whose logits fill a buffer of
    at most 32 MiB whatever N is. Same bits as `matmul`, a division, `sample_tokens` and
    `log_softmax` of the whole logits.
    """
    if h_ND.dtype != unembed_VD.dtype:
        raise ValueError(f"draw_tokens: h is {h_ND.dtype}, unembed is {unembed_VD.dtype}")
    parts = [
        _draw(
            h_ND[i : i + MOST_ROWS],
            unembed_VD,
            None if draws is None else Draws(*(x_N[i : i + MOST_ROWS] for x_N in draws)),
            None if wants_N is None else wants_N[i : i + MOST_ROWS],
            scale,
            purpose,
        )
        for i in range(0, max(1, h_ND.shape[0]), MOST_ROWS)
    ]
    if len(parts) == 1:
        return parts[0]
    ids, raw, sampled = zip(*parts, strict=True)
    if wants_N is None:
        return Drawn(torch.cat(ids), None, None)
    return Drawn(torch.cat(ids), torch.cat(raw), torch.cat(sampled))


def _draw(
    h_ND: Tensor,
    unembed_VD: Tensor,
    draws: Draws | None,
    wants_N: Tensor | None,
    scale: float,
    purpose: int,
) -> Drawn:
    if dispatch.use_reference(h_ND):
        return Drawn(*reference.draw_tokens(h_ND, unembed_VD, draws, wants_N, scale, purpose))
    if h_ND.device.type != "cuda" or h_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("draw_tokens", h_ND)
    from suzuri.kernels.draw_tokens import kernel

    return Drawn(*kernel.draw_tokens(h_ND, unembed_VD, draws, wants_N, scale, purpose))
