"""Which Triton kernels a piece of code would launch, without launching them.

`unlaunched` is the one place through which launches are seen; it knows no kernel by name. Every
launch is bound as Triton would bind it, up to the point where a kernel that is not there yet would
be compiled, and noted in Triton's own notation. compilation.py compiles what was noted.
"""

# Triton's classes come without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.errors import TritonError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

TRITON_ERRORS = (
    TritonError,
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError),
    *(AssertionError, ArithmeticError, OSError, ImportError, NotImplementedError),
)
"""What Triton raises for a kernel that cannot be bound, compiled or loaded."""

ALIGNMENT = 16
"""Triton asks of pointers and integers whether this divides them."""
_EMPTY = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)


@dataclasses.dataclass(frozen=True)
class Specialization:
    """A kernel to compile: the jit function by module and name, and Triton's description of types,
    constants and options ("" in the interpreter)."""

    module: str
    name: str
    data: str
    function: Any = dataclasses.field(compare=False, repr=False, default=None)


class Launches:
    """What was seen: `kernels` to compile, in order, and `problems`, launches that could not be
    described, by function. `count` launches in all."""

    def __init__(self) -> None:
        self.kernels: dict[Specialization, None] = {}
        self.keys: set[Hashable] = set()
        self.problems: dict[str, str] = {}
        self.count = 0


class _Zeros(TorchDispatchMode):
    """Memory without content holds zeros: nothing is launched that would fill it, and what torch
    then reads as indices must lie in range."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            out.zero_()
        return out


@contextlib.contextmanager
def unlaunched() -> Generator[Launches]:
    """Inside the block this thread launches no Triton kernel and compiles none; what it would have
    launched is noted. Torch's own operations run, on zeros where a kernel would have written.

    Other threads are not touched. Not to be nested.
    """
    found, owner = Launches(), threading.get_ident()
    hook: Callable[..., Any] | None = knobs.runtime.jit_cache_hook
    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    runs = {kind: kind.run for kind in kinds}

    def noted(**words: Any) -> Any:
        """In place of a compilation. True: there is to be none."""
        if threading.get_ident() != owner:
            return hook(**words) if hook is not None else False
        function = words["fn"].jit_function
        data = words["compile"]["specialization_data"]
        info = function.fn
        kernel = Specialization(info.__module__, info.__qualname__, data, function)
        found.kernels.setdefault(kernel)
        return True

    def observed(self: Any, *args: Any, grid: Any, warmup: bool, **words: Any) -> Any:
        run = runs[type(self)] if type(self) in runs else runs[JITFunction]
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **words)
        found.count += 1
        key = launch_key(self, args, words)
        if key in found.keys:
            return None
        found.keys.add(key)
        if kinds[1] in type(self).__mro__:
            info = self.fn
            found.kernels.setdefault(
                Specialization(info.__module__, info.__qualname__, repr(key[1:]), self)
            )
            return None
        try:
            run(self, *args, grid=grid, warmup=True, **words)
        except TRITON_ERRORS as error:
            name = f"{self.fn.__module__}.{self.fn.__qualname__}"
            found.problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    knobs.runtime.jit_cache_hook = noted
    for kind in kinds:
        kind.run = observed
    try:
        with _Zeros():
            yield found
    finally:
        for kind, run in runs.items():
            kind.run = run
        knobs.runtime.jit_cache_hook = hook


def launch_key(function: Any, args: tuple[Any, ...], words: dict[str, Any]) -> tuple[Hashable, ...]:
    """Equal for launches of which Triton compiles one kernel; cheap, and rather too fine: it spares
    most of them the description."""
    constants = getattr(function, "constexprs", ())
    return (
        id(function),
        *(_value_of(x) if i in constants else _class_of(x) for i, x in enumerate(args)),
        *((name, _value_of(value)) for name, value in words.items()),
    )


def _class_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if type(value) is int:
        return value == 1, value % ALIGNMENT == 0, value.bit_length() > 31
    return _value_of(value)


def _value_of(value: Any) -> Hashable:
    base = getattr(value, "base", None)
    if isinstance(base, torch.Tensor):  # a tensor descriptor
        return base.dtype, tuple(value.block_shape), base.data_ptr() % ALIGNMENT == 0
    if isinstance(value, torch.Tensor):
        return _class_of(value)
    return value if isinstance(value, Hashable) else repr(value)
