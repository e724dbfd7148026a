"""As reference.py, row by row."""

from torch import Tensor

from suzuri.kernels.arrays import lasting
from suzuri.kernels.compiled import check_slots, loop, words


@loop
def _write(k, v, k_pages, v_pages, slots):
    rows, heads, channels = k.shape
    size = k_pages.shape[1]
    check_slots(slots, k_pages.shape[0] * size)
    for n in range(rows):
        if slots[n] >= 0:
            k_place = k_pages[slots[n] // size, slots[n] % size]
            v_place = v_pages[slots[n] // size, slots[n] % size]
            for u in range(heads):
                for c in range(channels):
                    k_place[u, c] = k[n, u, c]
                    v_place[u, c] = v[n, u, c]


def kv_write(
    k_NUC: Tensor, v_NUC: Tensor, k_pages_PTUC: Tensor, v_pages_PTUC: Tensor, slots_N: Tensor
) -> None:
    rows = (words(k_NUC.contiguous()), words(v_NUC.contiguous()))
    _write(*rows, words(k_pages_PTUC), words(v_pages_PTUC), lasting(slots_N))
