"""Memory for large intermediate results on the CPU, used again by the next op.

A fresh tensor of this size comes from the system page by page and goes back at once, which costs
more than the arithmetic on it.
"""

import math
import threading

import torch
from torch import Tensor

MOST_ELEMENTS = 1 << 22
"""Larger ones are made afresh, so that no long context stays behind in memory."""


MOST_VIEWS = 256


class _Buffers(threading.local):
    """`views` of the buffers, by what was asked for: finding one is quicker than making it."""

    held: dict[tuple[str, torch.dtype], Tensor]
    views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor]
    operands: dict[tuple[tuple[int, ...], int, int], tuple[Tensor, Tensor]]
    num_elements: int

    def __init__(self) -> None:
        self.held, self.views, self.operands, self.num_elements = {}, {}, {}, 0


_buffers = _Buffers()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor. It is overwritten by the next call of this thread with the same
    `use`: it must not be returned, nor held across a call that might ask for it.
    """
    view = _buffers.views.get((use, shape, dtype))
    if view is not None:
        return view
    num_elements = math.prod(shape)
    if num_elements > MOST_ELEMENTS:
        return torch.empty(shape, dtype=dtype)
    # Not an inference tensor, whatever the mode now: it must be writable in every mode.
    with torch.inference_mode(False):
        buffer = _buffers.held.get((use, dtype))
        if buffer is None or buffer.numel() < num_elements or len(_buffers.views) >= MOST_VIEWS:
            _buffers.views.clear()
            buffer = torch.empty(num_elements, dtype=dtype)
            _buffers.held[use, dtype] = buffer
        view = buffer[:num_elements].reshape(shape)
    _buffers.views[use, shape, dtype] = view
    return view


def operand(shape: tuple[int, ...], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(an fp64 operand [..., R, K], its part [..., :rows, :columns] to fill): what pads it is zero,
    as nobody ever writes there. Held as shortly as `scratch`, whatever its shape.

    Old numbers there would be slow where they happen to be subnormal.
    """
    found = _buffers.operands.get((shape, rows, columns))
    if found is not None:
        return found
    num_elements = math.prod(shape)
    if num_elements > MOST_ELEMENTS:
        whole = torch.zeros(shape, dtype=torch.float64)
        return whole, whole[..., :rows, :columns]
    if _buffers.num_elements + num_elements > MOST_ELEMENTS:
        _buffers.operands.clear()
        _buffers.num_elements = 0
    with torch.inference_mode(False):
        whole = torch.zeros(shape, dtype=torch.float64)
        found = whole, whole[..., :rows, :columns]
    _buffers.operands[shape, rows, columns] = found
    _buffers.num_elements += num_elements
    return found
