"""Scatter of rows into pages."""

from torch import Tensor


def kv_write(
    k_NUC: Tensor, v_NUC: Tensor, k_pages_PTUC: Tensor, v_pages_PTUC: Tensor, slots_N: Tensor
) -> None:
    kept_M = (slots_N >= 0).nonzero()[:, 0]
    slots_M = slots_N[kept_M]
    size = k_pages_PTUC.shape[1]
    k_pages_PTUC[slots_M // size, slots_M % size] = k_NUC[kept_M].detach()
    v_pages_PTUC[slots_M // size, slots_M % size] = v_NUC[kept_M].detach()
