"""Values made from tensors once and used while those tensors stay as they are.

For the CPU: the transposed copy of a weight (exact.py) and the scale of a batch's positions
(log_scaling). A value is found again only if every tensor is the same object or
the same view of it, over the same memory, and unchanged; it is dropped as soon as one of them dies.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter  # exact: reads attributes
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

T = TypeVar("T")

LIMIT_BYTES = 1 << 29
"""Most that is held of values that give their size: beyond it they are made anew each time."""

# torch has no public names for these.
_base_of = attrgetter("_base")
_version_of = attrgetter("_version")
_identity_of = attrgetter("_cdata")


class _Entry(NamedTuple):
    """`storages` keep the identity of freed memory from being given out again, not the memory."""

    state: tuple[Hashable, ...]
    value: Any
    num_bytes: int
    owners: tuple[Any, ...]
    storages: tuple[Any, ...]


_entries: dict[Hashable, _Entry] = {}
_held = [0]


def kept(
    build: Callable[..., T],
    *tensors: Tensor,
    params: tuple[Hashable, ...] = (),
    num_bytes: int = 0,
) -> T:
    """build(*tensors, *params), made anew only when a tensor has changed since the last call.

    A change is seen by the tensor's version counter, its memory or its layout. A write through
    `.data` moves no counter and is not seen: write in place under `torch.no_grad()` instead. Of
    tensors made under `torch.inference_mode`, which count no versions, nothing is kept. The value
    must not hold one of the tensors or a view of it (it would never be freed), nor a gradient.
    """
    if len(tensors) == 1 and isinstance(tensors[0], Parameter) and not tensors[0].is_inference():
        # A weight: the short way for what is asked hundreds of times a step.
        name, state, owners = (build, params, id(tensors[0])), _state_of(tensors[0]), tensors
    else:
        key: list[Hashable] = [build, params]
        states: list[Hashable] = []
        for tensor in tensors:
            if tensor.is_inference():
                return build(*tensors, *params)
            key += (id(owner_of(tensor)), tensor.storage_offset(), tensor.shape, tensor.stride())
            states += _state_of(tensor)
        name, state, owners = tuple(key), tuple(states), [owner_of(x) for x in tensors]
    entry = _entries.get(name)
    if entry is not None:
        if entry.state == state:
            return entry.value
        _drop(name)
    value = build(*tensors, *params)
    if _held[0] + num_bytes <= LIMIT_BYTES:
        drop = functools.partial(_drop, name)
        references = tuple(weakref.ref(owner, drop) for owner in owners)
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        _entries[name] = _Entry(state, value, num_bytes, references, storages)
        _held[0] += num_bytes
    return value


def _state_of(tensor: Tensor) -> tuple[Hashable, ...]:
    storage = _identity_of(tensor.untyped_storage())
    layout = (tensor.dtype, tensor.shape, tensor.stride())
    return (_version_of(tensor), tensor.data_ptr(), storage, *layout)


def owner_of(tensor: Tensor) -> Tensor:
    """The tensor itself, or the one that it is a view of."""
    base = _base_of(tensor)
    return tensor if base is None else base


def _drop(name: Hashable, _owner: object = None) -> None:
    entry = _entries.pop(name, None)
    if entry is not None:
        _held[0] -= entry.num_bytes


def held() -> tuple[int, int]:
    """Number of values held now, and the bytes of those that gave their size."""
    return len(_entries), _held[0]
