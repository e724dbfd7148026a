"""Small copies between host and device that make nobody wait.

On a GPU a plain copy of a list waits for everything launched before it. These go through pinned
memory instead: the host writes it and goes on, or is told when it may read.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


def upload(
    values: Sequence[Any] | npt.NDArray[Any] | Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """The numbers on the device, without waiting for it."""
    host: Tensor
    if isinstance(values, Tensor):
        host = values
    elif isinstance(values, np.ndarray):
        host = torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
    else:
        # By way of numpy, which reads a list eight times faster: a prompt is one.
        host = torch.from_numpy(np.array(values, NUMPY[dtype]))  # pyright: ignore[reportUnknownMemberType]
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: npt.NDArray[Any]) -> None:
    """Writes the numbers into a tensor of the device, in the order of its queue."""
    host = torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)


class Download:
    """Tensors on their way to the host, from where the device's queue stands now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [_pinned(x).copy_(x, non_blocking=True) for x in tensors]
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[list[Any]]:
        """What was copied, as Python numbers: waits until it is there, and for nothing later."""
        if self._event is not None:
            self._event.synchronize()
        return [cast(list[Any], _listed(x)) for x in self._tensors]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """As `lists`, as arrays that share the memory."""
        if self._event is not None:
            self._event.synchronize()
        return [x.numpy() for x in self._tensors]


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


def _listed(x: Tensor) -> Any:
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
