"""Which implementation of an op runs: the reference on CPU, the GPU kernel on GPU, nothing else.

There is no registry and no environment switch. `force("reference")` is the one explicit way to run
references on a GPU (to check a kernel, or to check the references themselves there).
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

BACKENDS = ("reference",)

_forced: list[str] = []
"""Blocks entered and not left. For the whole process, not the thread: autograd runs the backward of
GPU tensors, and with it the recomputation of checkpointed ops, on a thread of its own."""


@contextmanager
def force(backend: str) -> Generator[None]:
    """Run every op of the process inside the block with `backend` ("reference"), on any device.

    Raises ValueError for any other name: an unknown backend must never fall back silently.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def use_reference(tensor: torch.Tensor) -> bool:
    """True when `tensor`'s op must run its reference: on CPU always, elsewhere when forced."""
    return tensor.device.type == "cpu" or "reference" in _forced[-1:]


def no_kernel(op: str, tensor: torch.Tensor) -> NotImplementedError:
    """The error of an op that has no kernel for `tensor`'s device (never a silent slow path)."""
    return NotImplementedError(
        f"{op}: no kernel for device {str(tensor.device)!r}; run on CPU, or wrap the call in "
        'suzuri.kernels.dispatch.force("reference") to run the (slow) reference there'
    )
