"""As reference.py: the loops of paged_attention, over pages of one key each that lie in order."""

import torch
from torch import Tensor

from suzuri.kernels.paged_attention import cpu as paged


def relative_attention(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> Tensor:
    starts_S = seq_starts_S1[:-1]
    longest = max((seq_starts_S1[1:] - starts_S).tolist(), default=0)
    # Behind a sequence's last key the table names rows of the next one, which no row may see.
    table_SM = starts_S[:, None] + torch.arange(longest)
    first_S = torch.zeros_like(starts_S)
    pages = (k_NUC[:, None], v_NUC[:, None])
    where = (table_SM, first_S, seq_starts_S1)
    return paged.paged_attention(q_NHC, r_NHB, proj_BE, *pages, *where, window)
