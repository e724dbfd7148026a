"""How the Triton kernels are run in tests: the interpreter on a CPU (fp32: its bf16 products are
wrong), the GPU with `-m gpu`, and results in memory that was filled with NaN.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET is not 1")
on_gpu = pytest.mark.gpu
LOW = (torch.bfloat16, torch.float32)


def kernel_cases(shapes: Iterable[str], *, dtypes: Iterable[torch.dtype] = LOW) -> list[Any]:
    """(device, case, dtype): the small cases in the interpreter in fp32, all on a GPU."""
    names = list(shapes)
    small = [name for name in names if not name.startswith(("inkling", "router"))]
    cpu = [pytest.param("cpu", name, torch.float32, marks=in_interpreter) for name in small]
    return cpu + [
        pytest.param("cuda", name, dtype, marks=on_gpu) for name in names for dtype in dtypes
    ]


@contextmanager
def nan_filled() -> Iterator[None]:
    """New memory holds NaN (integers their largest value) inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
