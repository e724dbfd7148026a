"""NumPy views of CPU tensors, which the compiled loops work on. NumPy has no bf16: widen first."""

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

_lasting: dict[int, tuple[weakref.ref[Tensor], int, Array]] = {}


def array(x: Tensor) -> Array:
    """The elements of a CPU tensor, shared: what is written there is written to the tensor."""
    return x.detach().numpy() if x.requires_grad else x.numpy()


def lasting(x: Tensor) -> Array:
    """As `array`, found again quickly: for tensors that are asked for in every layer or step."""
    name = id(x)
    found = _lasting.get(name)
    if found is not None and found[0]() is x and found[1] == x.data_ptr():
        view = found[2]
        if view.shape == x.shape:
            return view
    # Of a detached twin: an array holds the tensor that it is a view of.
    view = x.detach().numpy()
    _lasting[name] = (weakref.ref(x, lambda _: _lasting.pop(name, None)), x.data_ptr(), view)
    return view


def empty(*shape: int) -> Array:
    """Uninitialised fp32 elements for a result; `tensor` makes a tensor of them."""
    return np.empty(shape, np.float32)


def tensor(x: Array, dtype: torch.dtype = torch.float32) -> Tensor:
    """The elements of an fp32 array, shared, or a copy in another dtype."""
    found = torch.from_numpy(x)
    return found if dtype == torch.float32 else found.to(dtype)
