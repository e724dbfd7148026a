"""A GPU that is not there: tensors lie on the CPU and say that they are on a GPU, so that the
model takes the way it takes on a GPU. Its kernels run in Triton's interpreter, or are not launched.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 99)
"""A number that no GPU has: what kernels keep per device must not be found by a real one."""
CPU = torch.device("cpu")
_DEVICE, _IS_CPU, _IS_CUDA = (
    vars(torch.Tensor.__base__)[name].__get__ for name in ("device", "is_cpu", "is_cuda")
)


class _Properties:
    name, major, minor = "pretended", 9, 0
    multi_processor_count = 132
    shared_memory_per_block_optin = 227 << 10


class _Stream:
    def synchronize(self) -> None: ...


class _Event:
    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class _Pretence(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return GPU
        if func in (_IS_CPU, _IS_CUDA):
            return func == _IS_CUDA
        words = {name: _there(value) for name, value in (kwargs or {}).items()}
        if words.pop("pin_memory", False) or func is torch.Tensor.pin_memory:
            return func(*args, **words) if func is not torch.Tensor.pin_memory else args[0]
        return func(*map(_there, args), **words)


def _there(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return CPU if isinstance(value, str) and value.startswith("cuda") else value


@contextlib.contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Generator[torch.device]:
    """Inside the block every tensor says that it lies on the device that is yielded."""
    for name, value in {
        "get_device_properties": lambda device=None: _Properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: _Stream(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Event": _Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with _Pretence():
        yield GPU
