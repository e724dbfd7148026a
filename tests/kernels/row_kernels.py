"""What the tests of the row-wise kernels share on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.kernels.forward_ops import CAUSAL, FORWARD_OPS, Draw
from tests.kernels.rows import LAYOUTS, assert_rows_alone

COUNTS = (1, 2, 3, 7, 16, 33, 64, 70)


def assert_rows_alone_on_gpu(op: str, dtype: torch.dtype) -> None:
    """The op's kernel gives rows alone, and rows of inputs with other strides, the same bits."""
    ways = [FORWARD_OPS[op](Draw(dtype, "cuda", layout)) for layout in LAYOUTS.values()]
    causal = op in CAUSAL
    assert_rows_alone(ways[0], others=ways[1:], counts=COUNTS, causal=causal, device="cuda")


@contextmanager
def without_sync() -> Iterator[None]:
    """Raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
