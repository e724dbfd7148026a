"""What a walk through the steps found (rehearsal.py), kept on disk for the next start.

A walk takes seconds, and with page tables for a million tokens more than ten; it finds the same
kernels as long as code, model, limits and GPU are the same, which the fingerprint of its file says.
How many pages there are is no part of that: it changes with the memory that happens to be free, and
no launch is told (tests/engine/test_kept_walks.py). A list that lacks a kernel would cost time,
never a bit: the kernel would be compiled on first use.
"""

# Triton's classes come without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from msgspec import MsgspecError, convert
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from suzuri.engine.capacity import Capacity
from suzuri.engine.compile_server import function_named
from suzuri.engine.config import EngineConfig
from suzuri.engine.kernel_keys import PACKAGE
from suzuri.engine.launches import ALIGNMENT, Specialization
from suzuri.engine.runner import Runner
from suzuri.kernels.cache_folder import kept_file, of_fingerprint, read_kept, write_kept
from suzuri.kernels.matmul import buckets
from suzuri.model.fingerprint import source_hash
from suzuri.processing.vocabulary import Vocabulary

FOLDER = "walks"
MOST = 32
"""Files that are kept, the last used ones: another model, limit or version is another file."""
NO_PART = {"memory_gb", "global_pages", "local_pages", "snapshots"}
"""Fields of an engine's config and capacity that no kernel depends on."""

Found = tuple[list[Specialization], list[buckets.Shape]]
"""Kernels to compile, and products of which the library's bits are to be tested."""


def fingerprint(runner: Runner, vocabulary: Vocabulary) -> dict[str, object]:
    """Everything that a walk's findings are valid for. Asks the GPU and Triton."""
    model, graphs = runner.model, runner.graphs
    weights = [
        (name, tuple(x.shape), str(x.dtype), x.data_ptr() % ALIGNMENT)
        for name, x in model.decoder.state_dict().items()
    ]
    parts = {
        "code": source_hash(("",)) + source_hash(("kernels",), "*.json"),  # and its tables
        "compiler": _compiler(),
        "model": repr(model.config),
        "weights": repr(weights),
        "limits": repr(_without(runner.config)),
        "capacity": repr(_without(runner.capacity)),
        "recorded": repr(None if graphs is None else graphs.sizes),
        "rows": repr((type(vocabulary).__name__, vocabulary.num_rows)),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}
    return buckets.fingerprint(runner.device) | digests


def read(print_: dict[str, object]) -> Found | None:
    """What an earlier walk of this fingerprint found; None when none is kept, or when its file is
    not what `write` writes."""
    path = kept_file(FOLDER, print_)
    content = of_fingerprint(read_kept(path), print_)
    if path is None or content is None:
        return None
    try:
        kernels = convert(content.get("kernels"), list[tuple[str, str, str]])
        shapes = convert(content.get("shapes"), list[tuple[int, int, str, str]])
        found = (
            [_kernel(*entry) for entry in kernels],
            [(n, k, _dtype(dtype), _dtype(out)) for n, k, dtype, out in shapes],
        )
    except (MsgspecError, ValueError, AttributeError, ImportError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used just now
    return found


def write(print_: dict[str, object], found: Found) -> None:
    """Keeps a walk's findings, and forgets those that were not used for longest."""
    path = kept_file(FOLDER, print_)
    kernels, shapes = found
    write_kept(
        path,
        print_,
        kernels=[(kernel.module, kernel.name, kernel.data) for kernel in kernels],
        shapes=[(n, k, _name(dtype), _name(out)) for n, k, dtype, out in shapes],
    )
    if path is not None:
        _forget(path.parent)


def _forget(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process may forget the same
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST]:
            file.unlink()


def _kernel(module: str, name: str, data: str) -> Specialization:
    if not module.startswith(PACKAGE):
        raise ValueError(f"{module}: not of this package")
    function = function_named(module, name)
    if not isinstance(function, JITFunction):
        raise ValueError(f"{module}.{name}: not a kernel")
    return Specialization(module, name, data, function)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError("not a dtype")
    return found


def _without(settings: EngineConfig | Capacity) -> list[tuple[str, object]]:
    values = dataclasses.asdict(settings)
    return [(name, value) for name, value in values.items() if name not in NO_PART]


def _compiler() -> str:
    """What Triton writes into the description of every kernel, whatever it is launched with."""
    active: Any = driver.active
    options = make_backend(active.get_current_target()).parse_options({})
    return repr((options, knobs.runtime.debug, knobs.compilation.instrumentation_mode))
