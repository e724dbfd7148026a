"""Writes new keys and values into their pages."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.kv_write import reference


def kv_write(
    k_NUC: Tensor, v_NUC: Tensor, k_pages_PTUC: Tensor, v_pages_PTUC: Tensor, slots_N: Tensor
) -> None:
    """pages[slot // T, slot % T] = row, in place; a select of bits, no arithmetic.

    k_NUC, v_NUC [N, U, C]; k_pages_PTUC, v_pages_PTUC [pages, page size T, U, C], same dtype;
    slots_N [N] int64, page * T + offset, all different; a negative slot is not written. No
    gradients.
    """
    for rows, pages in ((k_NUC, k_pages_PTUC), (v_NUC, v_pages_PTUC)):
        if rows.dtype != pages.dtype:
            raise ValueError(f"kv_write: rows are {rows.dtype}, pages are {pages.dtype}")
    pages = (k_pages_PTUC, v_pages_PTUC)
    if dispatch.use_cpu(k_NUC, v_NUC) and all(x.is_contiguous() for x in pages):
        from suzuri.kernels.kv_write import cpu

        cpu.kv_write(k_NUC, v_NUC, k_pages_PTUC, v_pages_PTUC, slots_N)
        return
    if dispatch.use_reference(k_NUC):
        reference.kv_write(k_NUC, v_NUC, k_pages_PTUC, v_pages_PTUC, slots_N)
        return
    if k_NUC.device.type != "cuda":
        raise dispatch.no_kernel("kv_write", k_NUC)
    from suzuri.kernels.kv_write import kernel

    kernel.kv_write(k_NUC, v_NUC, k_pages_PTUC, v_pages_PTUC, slots_N)
