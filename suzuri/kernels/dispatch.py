"""Which implementation of an op runs: the reference on CPU, the GPU kernel on GPU, nothing else.

There is no registry and no environment switch. `force("reference")` is the one explicit way to run
references on a GPU (to check a kernel, or to check the references themselves there).
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from suzuri.kernels.exact import has_loops, records_gradient

BACKENDS = ("reference",)
SMALL = 1 << 22
"""Elements (keys seen by all rows, times their width) that one thread handles alone."""

LOOP_DTYPES = (torch.float32, torch.bfloat16)

_apart: list[None] = []
"""Blocks of `apart` entered and not left, as `_forced`."""

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


def is_forced() -> bool:
    """Whether a backend is forced: then the reference's own autograd is what records a gradient."""
    return bool(_forced)


@contextmanager
def apart() -> Generator[None]:
    """Inside the block the model calls its modules one by one also where an op joins several: for
    whoever watches what leaves each of them. No bit changes."""
    _apart.append(None)
    try:
        yield
    finally:
        _apart.pop()


def is_apart() -> bool:
    """Whether modules are called one by one: see `apart`."""
    return bool(_apart)


def use_joined(weight: torch.Tensor) -> bool:
    """True when a model with such weights calls ops that join several modules: on a GPU, without a
    gradient, unless somebody watches the modules."""
    if weight.device.type != "cuda" or _forced or _apart or weight.dtype not in LOOP_DTYPES:
        return False
    return not records_gradient(weight)


def use_reference(tensor: torch.Tensor) -> bool:
    """True when `tensor`'s op must run its reference: on CPU always, elsewhere when forced."""
    return tensor.device.type == "cpu" or "reference" in _forced[-1:]


def use_cpu(*tensors: torch.Tensor) -> bool:
    """True when an op may run its cpu.py: compiled loops, bit-equal to its reference, fp32 and
    bf16, without a gradient. The op imports cpu.py there: it loads the compiler."""
    x = tensors[0]
    if not x.is_cpu or _forced or x.dtype not in LOOP_DTYPES:
        return False
    return has_loops() and not records_gradient(*tensors)


@contextmanager
def threads_for(elements: int, device: torch.device) -> Generator[None]:
    """Runs the block on one CPU thread when its ops handle at most SMALL elements.

    So little is done before a second thread has started, and on a busy machine every op that waits
    for one waits for a time slice. The bits are those of any number of threads. Elsewhere nothing
    changes.
    """
    threads = torch.get_num_threads()
    if threads == 1 or elements > SMALL or device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def no_kernel(op: str, tensor: torch.Tensor) -> NotImplementedError:
    """The error of an op that has no kernel for `tensor`'s device (never a silent slow path)."""
    return NotImplementedError(
        f"{op}: no kernel for device {str(tensor.device)!r}; run on CPU, or wrap the call in "
        'suzuri.kernels.dispatch.force("reference") to run the (slow) reference there'
    )
