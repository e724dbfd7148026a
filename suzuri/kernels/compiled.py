"""How loops for the CPU are compiled, kept, fed and shared out over threads.

They are Python that numba compiles at first use and keeps on disk: strict IEEE 754, no fast-math,
sums in the order in which they are written, so that vectorising cannot change a bit. The sources
under suzuri/kernels and the versions of numba and Python name the folder of the compiled code: a
changed source is never run from an old file.
"""

import functools
import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba.core import config, types
from numba.extending import overload
from torch import Tensor

from suzuri.kernels.arrays import Array, array, lasting
from suzuri.kernels.cache_folder import cache_folder, write_whole
from suzuri.log import get_logger

F = TypeVar("F", bound=Callable[..., Any])

numba_config: Any = config
if numba_config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")
numba_module: Any = numba
_cache_of = attrgetter("_cache")  # numba has no public name for it
_log = get_logger(__name__)


@functools.cache
def _folder() -> str:
    """Where compiled code is kept; "" is nowhere."""
    place = cache_folder("loops")
    if place is None:
        return ""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    root = Path(__file__).parent
    for source in [*sorted(root.glob("*.py")), *sorted(root.glob("*/cpu.py"))]:
        digest.update(source.read_bytes())
    return str(place / digest.hexdigest()[:16])


def loop(function: F, *, fused: bool = False, reordered: bool = False) -> F:
    """Compiles `function` at its first call; it runs without holding the interpreter lock.

    With `fused` a product and the sum that it joins may be one instruction. That changes no bit
    where the product is exact, as that of two fp32 numbers is in fp64: for such loops only. With
    `reordered` sums too are taken in the compiler's order: for gradients, whose bits need to be
    equal from run to run only.
    """
    # Under a name of its own, or both forms of a function would share one file on disk.
    kind = "_reordered" if reordered else "_fused" if fused else ""
    name = f"{function.__name__}{kind}"
    source = _kept_source(Path(function.__code__.co_filename))
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc"} if reordered else {"contract"} if fused else False,
    }
    copy, compile_it = _copied(function, name, source), numba_module.njit
    before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, _folder()
    try:
        if source is None:
            return compile_it(copy, **options)
        return _careful(compile_it(copy, cache=True, **options))
    except RuntimeError as error:  # a folder that can be read and not written
        _cannot_keep(error)
        return compile_it(copy, **options)
    finally:
        numba_config.CACHE_DIR = before


def _careful(dispatcher: Any) -> Any:
    """The dispatcher, which goes on without keeping what it compiled where the disk is full."""
    cache = _cache_of(dispatcher)
    save = cache.save_overload

    def save_if_it_can(*args: Any) -> None:
        try:
            save(*args)
        except OSError as error:
            _cannot_keep(error)

    cache.save_overload = save_if_it_can
    return dispatcher


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning(reason)


def _cannot_keep(error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) else "it cannot be written"
    _say_once(
        f"compiled loops cannot be kept in {_folder()} ({reason}): every run compiles them, which "
        "takes some 20 seconds; XDG_CACHE_HOME names another place"
    )


def _kept_source(source: Path) -> Path | None:
    """A copy of the source beside what is compiled of it: numba finds its files by the path of the
    source, and another checkout of the same sources is to find them too. None: nothing is kept."""
    if not _folder():
        return None
    kept = Path(_folder()) / "sources" / f"{source.parent.name}_{source.name}"
    try:
        if not kept.exists():
            is_new = not kept.parent.exists()
            write_whole(kept, source.read_bytes())
            if is_new:
                _log.info("compiling the loops for the CPU; only the first run waits for it")
    except OSError as error:
        _cannot_keep(error)
        return None
    return kept


def _copied(function: F, name: str, source: Path | None) -> F:
    code = function.__code__
    if source is not None:
        code = code.replace(co_filename=str(source))
    copy: Any = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__qualname__, copy.__module__ = name, function.__module__
    return copy


@loop
def check_indices(index, size):
    """Loops look nothing up in bounds of their own: an index from outside is checked first."""
    for i in range(index.size):
        if index[i] < 0 or index[i] >= size:
            raise IndexError("an index is outside of what it points into")


@loop
def check_slots(slots, size):
    """As `check_indices`; a negative slot is nowhere."""
    for i in range(slots.size):
        if slots[i] >= size:
            raise IndexError("a slot is outside of the pages")


def number(x):
    """In a loop: the fp32 number that an element of `words` stands for."""
    raise NotImplementedError("a part of compiled loops only")


@overload(number)
def _number(x):
    if isinstance(x, types.Integer):

        def read(x):
            return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    else:

        def read(x):
            return np.float32(x)

    return read


def put(place, x):
    """In a loop: writes numbers into `words`, which must hold them exactly."""
    raise NotImplementedError("a part of compiled loops only")


@overload(put)
def _put(place, x):
    if isinstance(place.dtype, types.Integer):

        def write(place, x):
            for i in range(x.size):
                place[i] = np.uint16(np.float32(x[i]).view(np.uint32) >> np.uint32(16))
    else:

        def write(place, x):
            for i in range(x.size):
                place[i] = x[i]

    return write


SMALL_PRODUCT = 1 << 22
"""Multiplications that one thread does before a second one has started."""


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="suzuri-loops")


def spread(work: int, parts: int, run: Callable[[int, int], None]) -> None:
    """run(first, last) over parts 0 .. `parts`, shared out to torch's number of threads when the
    work (multiplications) is worth it. No result may depend on where the parts are cut."""
    threads = min(torch.get_num_threads(), parts) if work > SMALL_PRODUCT else 1
    if threads <= 1:
        run(0, parts)
        return
    first, *rest = pairwise([parts * i // threads for i in range(threads + 1)])
    waiting = [_pool().submit(run, *part) for part in rest]
    run(*first)
    for part in waiting:
        part.result()


def share(parts: int, run: Callable[[int, int], None], *, at_once: int) -> None:
    """As `spread`, in pieces of `at_once` parts that whoever is free takes next: for long work that
    only reads or writes memory, where a thread that others hold up is not to hold up all."""
    pieces = iter(range(0, parts, at_once))  # each is taken once, whichever thread asks

    def take() -> None:
        for first in pieces:
            run(first, min(first + at_once, parts))

    threads = min(torch.get_num_threads(), -(-parts // at_once))
    others = [_pool().submit(take) for _ in range(threads - 1)]
    take()
    for other in others:
        if not other.cancel():  # it has begun
            other.result()


def words(x: Tensor) -> Array:
    """A bf16 tensor as its bits, shared; others as they are."""
    return array(x.view(torch.uint16) if x.dtype == torch.bfloat16 else x)


def lasting_words(x: Tensor) -> Array:
    """As `words`, found again quickly."""
    return lasting(x) if x.dtype == torch.float32 else words(x)
