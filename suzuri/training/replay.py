"""Experts that a sample brings along, taken in place of the model's own choice.

For data of other weights than those that learn: what was drawn through some experts is learned
through the same ones. Their weights, and so the router's gradient, are the model's own.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from suzuri.model.config import TextConfig
from suzuri.types import Array, Sample

CHOOSES = -1
"""In place of ids: the model chooses."""


def checked_routing(sample: Sample, text: TextConfig) -> Array | None:
    """The sample's experts int16 [T, L, K], CHOOSES where it gives none; None where it has none.

    Raises ValueError for what this model cannot replay.
    """
    if sample.routing is None:
        if sample.routing_mask is not None:
            raise ValueError("routing_mask without routing, which it belongs to")
        return None
    given = np.asarray(sample.routing)
    shape = (sample.num_tokens, text.num_moe_layers, text.num_experts_per_tok)
    if not text.num_moe_layers:
        raise ValueError("routing: this model has no routed experts; leave it out")
    if given.shape != shape or given.dtype != np.uint8:
        raise ValueError(
            f"routing is {given.dtype} {list(given.shape)}; need uint8 {list(shape)}: "
            f"{text.num_experts_per_tok} experts in {text.num_moe_layers} layers for each token"
        )
    mask_T = np.ones(shape[0], np.bool_)
    if sample.routing_mask is not None:
        mask_T = np.asarray(sample.routing_mask)
    if mask_T.shape != shape[:1] or mask_T.dtype != np.bool_:
        raise ValueError(
            f"routing_mask is {mask_T.dtype} {list(mask_T.shape)}; need bool {list(shape[:1])}"
        )
    known = given[mask_T].astype(np.int16)
    if (most := known.max(initial=0)) >= text.n_routed_experts:
        raise ValueError(f"routing: expert {most}, and there are {text.n_routed_experts}")
    if (np.diff(known, axis=-1) <= 0).any():
        raise ValueError("routing: the experts of a token must rise, none given twice")
    found = np.full(shape, CHOOSES, np.int16)
    found[mask_T] = known
    return found


def packed_routing(
    samples: Sequence[Array | None], lengths: Sequence[int], device: torch.device
) -> Tensor | None:
    """Batch.given_experts_LNK of packed samples; None where none has any."""
    known = next((one for one in samples if one is not None), None)
    if known is None:
        return None
    parts = [
        np.full((length, *known.shape[1:]), CHOOSES, np.int16) if one is None else one
        for one, length in zip(samples, lengths, strict=True)
    ]
    given_LNK = np.ascontiguousarray(np.concatenate(parts).swapaxes(0, 1))
    return torch.from_numpy(given_LNK).to(device).to(torch.int64)
