"""As reference.py; which rows are written is found out once for all layers of a batch."""

from torch import Tensor

from suzuri.kernels.arrays import Array, array
from suzuri.kernels.kept import kept


def kv_write(
    k_NUC: Tensor, v_NUC: Tensor, k_pages_PTUC: Tensor, v_pages_PTUC: Tensor, slots_N: Tensor
) -> None:
    kept_M = kept(_written, slots_N)
    for rows_NUC, pages_PTUC in ((k_NUC, k_pages_PTUC), (v_NUC, v_pages_PTUC)):
        pages_XUC = array(pages_PTUC).reshape(-1, *pages_PTUC.shape[2:])
        if kept_M is None:
            pages_XUC[array(slots_N)] = array(rows_NUC)
        else:
            pages_XUC[array(slots_N)[kept_M]] = array(rows_NUC)[kept_M]


def _written(slots_N: Tensor) -> Array | None:
    """Rows that are written; None when all are."""
    written_N = array(slots_N) >= 0
    return None if written_N.all() else written_N.nonzero()[0]
