"""One stable sort; each filter is a count of ids kept from its front (contract: __init__.py)."""

import torch
from torch import Tensor

from suzuri.kernels import exact

UNITS = 2.0**40
MOST_IDS = 1 << 22


def filter_logits(logits_NV: Tensor, min_p_N: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    logits_NV = exact.widen(logits_NV)
    width = logits_NV.shape[1]
    # Adding 0 makes -0 and 0 one value for every sort.
    key_NV, id_NV = torch.sort(logits_NV + 0.0, dim=-1, descending=True, stable=True)
    most_N1 = key_NV[:, :1]
    count_N1 = _count_min_p(most_N1 - key_NV, min_p_N)
    count_N1 = torch.minimum(count_N1, torch.where(top_k_N < 1, width, top_k_N)[:, None])
    count_N1 = count_N1.clamp(1, width)
    count_N1 = _count_top_p(key_NV - most_N1, count_N1, top_p_N)
    # The last id kept, by its logit and, among equal ones, its id: the sort is stable.
    lowest_N1 = exact.select(key_NV, count_N1 - 1)
    last_N1 = exact.select(id_NV, count_N1 - 1)
    id_V = torch.arange(width, device=logits_NV.device)
    # NaN compares as false: it stays, so that the row is still seen to have no answer.
    removed_NV = (logits_NV < lowest_N1) | ((logits_NV == lowest_N1) & (id_V > last_N1))
    return torch.where(removed_NV, -torch.inf, logits_NV)


def _count_min_p(below_NV: Tensor, min_p_N: Tensor) -> Tensor:
    """How many ids [N, 1] lie at most -ln(min_p) below the largest; below_NV ascends."""
    reach_N1 = -torch.log(min_p_N.to(below_NV.dtype))[:, None]
    return torch.searchsorted(below_NV.contiguous(), reach_N1, right=True)


def _count_top_p(above_NV: Tensor, count_N1: Tensor, top_p_N: Tensor) -> Tensor:
    """How many of the first count_N1 ids are needed to reach top_p; above_NV is logit - max."""
    weight_NV = (exact.exp(above_NV) * UNITS).to(torch.int64)
    before_NV = weight_NV.cumsum(-1)  # exact: integers
    total_N1 = exact.select(before_NV, count_N1 - 1)
    top_p_N1 = top_p_N[:, None]
    wanted_N1 = (top_p_N1.to(torch.float64) * total_N1.to(torch.float64)).to(torch.int64)
    needed_N1 = torch.searchsorted(before_NV, wanted_N1) + 1
    return torch.where(top_p_N1 < 1, torch.minimum(needed_N1, count_N1), count_N1)
