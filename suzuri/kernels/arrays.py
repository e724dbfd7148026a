"""NumPy views of CPU tensors, for cpu.py files: an operation on a few rows starts in a third of the
time that torch needs.

Only what IEEE 754 rounds in one way is done on them (+ - * /, comparisons, copies, conversions), so
that the bits are those of torch; exp, log, rsqrt and matrix products stay with torch. The list of
what NumPy may be used for is in tests/architecture/exact_ops.py. It has no bf16: widen first.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def has_arrays(*tensors: Tensor) -> bool:
    """Whether NumPy knows the dtype of all of these."""
    return all(x.dtype in (torch.float32, torch.float64) for x in tensors)


def array(x: Tensor) -> Array:
    """The elements of a CPU tensor, shared: what is written there is written to the tensor."""
    return x.detach().numpy() if x.requires_grad else x.numpy()


def tensor(x: Array) -> Tensor:
    """The elements of an array, shared."""
    return torch.from_numpy(x)


def tree(x: Array) -> Array:
    """Sum over the last dim (at most exact.FOLD long) by the tree of exact.tree_sum."""
    n = x.shape[-1]
    half = 1 << ((n - 1).bit_length() - 1) if n > 1 else 0
    if half and n != 2 * half:
        head = x[..., :half].copy()
        head[..., : n - half] += x[..., half:]
        x, half = head, half // 2
    while half:
        x = x[..., :half] + x[..., half:]
        half //= 2
    return x[..., 0]
