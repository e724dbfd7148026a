"""Gathers tiles of 64 keys from pages and hands them to the arithmetic of relative_attention."""

import torch
from torch import Tensor

from suzuri.kernels.relative_attention.reference import TILE, attend


def paged_attention(
    q_NHC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    k_pages_PTUC: Tensor,
    v_pages_PTUC: Tensor,
    page_table_SM: Tensor,
    first_positions_S: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> Tensor:
    lengths_S = seq_starts_S1[1:] - seq_starts_S1[:-1]
    out_NHC = torch.zeros_like(q_NHC)
    # Sequences with as many new rows run together; decode (one row each) is the usual case.
    for length in torch.unique(lengths_S).tolist():
        if length == 0:
            continue
        group_G = (lengths_S == length).nonzero()[:, 0]
        rows_GT = seq_starts_S1[group_G][:, None] + torch.arange(length, device=q_NHC.device)
        first_G = first_positions_S[group_G]
        tile = _PageTiles(k_pages_PTUC, v_pages_PTUC, page_table_SM[group_G], first_G + length)
        out_NHC[rows_GT] = attend(q_NHC[rows_GT], r_NHB[rows_GT], proj_BE, first_G, tile, window)
    return out_NHC


class _PageTiles:
    """Callable: the keys and values at absolute positions k0 .. k0 + TILE - 1 of G sequences."""

    def __init__(
        self, k_pages_PTUC: Tensor, v_pages_PTUC: Tensor, table_GM: Tensor, length_G: Tensor
    ) -> None:
        self.k_pages, self.v_pages = k_pages_PTUC, v_pages_PTUC
        self.table_GM, self.length_G = table_GM, length_G

    def __call__(self, k0: int) -> tuple[Tensor, Tensor]:
        size = self.k_pages.shape[1]
        position_B = k0 + torch.arange(TILE, device=self.table_GM.device)
        column_B = (position_B // size).clamp(max=self.table_GM.shape[1] - 1)
        exists_GB = position_B < self.length_G[:, None]
        page_GB = torch.where(exists_GB, self.table_GM[:, column_B], 0)
        # A page that slid out of the window may be freed: its table entry is then only in range.
        page_GB = page_GB.clamp(0, self.k_pages.shape[0] - 1)
        offset_GB = (position_B % size).expand_as(page_GB)
        keep = exists_GB[..., None, None]
        k_GBUC = torch.where(keep, self.k_pages[page_GB, offset_GB], 0.0)
        v_GBUC = torch.where(keep, self.v_pages[page_GB, offset_GB], 0.0)
        return k_GBUC, v_GBUC
