"""Makes the names under which Triton keeps kernels on disk independent of what a process ran first.

Triton hashes a function with those that it calls and the constants that they read. Up to 3.6 it
takes over the constants of a called function before it has looked for them, unless something else
asked for that function's hash before: two processes that meet kernels in different orders then look
for the same kernel under different names, and compile it twice.
"""

# Triton's classes come without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import sys
from typing import Any

from triton.runtime.jit import JITFunction

from suzuri.engine.launches import TRITON_ERRORS

PACKAGE = "suzuri."
MOST_PASSES = 10
"""Calls within calls are not that deep."""


def jit_functions() -> list[Any]:
    """Those of all modules of the package that are loaded, each once, in order of their names."""
    found: dict[tuple[str, str], Any] = {
        (value.fn.__module__, value.fn.__qualname__): value
        for name, module in [*sys.modules.items()]
        if name.startswith(PACKAGE)
        for value in [*vars(module).values()]
        if isinstance(value, JITFunction)
    }
    return [found[name] for name in sorted(found)]


def settle() -> None:
    """Hashes every jit function of the package again until no hash changes: from then on each knows
    the constants of all that it calls. To be called before anything is compiled or looked for."""
    functions = [function for function in jit_functions() if hasattr(function, "hash")]
    before: list[str | None] = []
    for _ in range(MOST_PASSES):
        for function in functions:
            function.hash = None  # what it read the last time is kept, and taken over by callers
        after = [_hash(function) for function in functions]
        if after == before:
            return
        before = after


def _hash(function: Any) -> str | None:
    with contextlib.suppress(*TRITON_ERRORS):  # told where it is compiled
        return function.cache_key
    return None
