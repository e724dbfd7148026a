"""The hashes of some jit functions, asked for in an order of chance, as Triton 3.6 makes them:
`python -m tests.engine.hashed SEED settled|plain` (not in the interpreter) prints JSON."""

import json
import random
import sys
from typing import Any

from triton.runtime import jit

from suzuri.engine import kernel_keys
from suzuri.kernels.draw_tokens import kernel as draw
from suzuri.kernels.log_softmax import kernel as log_softmax
from suzuri.kernels.router import kernel as router

MODULES = (draw, log_softmax, router)


def as_in_3_6(self: Any, func: Any) -> None:
    """What a called function reads is taken over before its hash says what that is."""
    self.used_global_vals.update(func.used_global_vals)
    key = func.cache_key + str(getattr(func, "noinline", False))
    self.hasher.update(key.encode())


def main() -> None:
    setattr(jit.DependenciesFinder, "_update_hash", as_in_3_6)  # noqa: B010
    names = {module.__name__ for module in MODULES}
    functions = [f for f in kernel_keys.jit_functions() if f.fn.__module__ in names]
    random.Random(int(sys.argv[1])).shuffle(functions)
    first = [function.cache_key for function in functions]
    if sys.argv[2] == "settled":
        kernel_keys.settle()
        first = [function.cache_key for function in functions]
    said = {
        f"{f.fn.__module__}.{f.fn.__qualname__}": x for f, x in zip(functions, first, strict=True)
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
