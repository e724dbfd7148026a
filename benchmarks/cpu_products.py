"""Products on the CPU: multiply-adds per second on one thread, by rows and by size of the weights.

    python benchmarks/cpu_products.py OUT.json --machine "2-core x86-64 CPU" [--before LOOPS.py]

LOOPS.py is an older suzuri/kernels/loops.py: its `products` takes turns with the present one, since
only what one run measured can be compared on a shared machine. Weights [K, N] are fp32, used again
and again, so that what fits into a cache lies there; each number is the best of many turns.
"""

import argparse
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from suzuri.kernels import loops, micro

ROWS = (1, 2, 4, 16, 64, 2048)
SIZES = ((16, 64), (64, 64), (256, 256), (1024, 256), (3072, 256), (4096, 4096))
"""(N, K)"""
Products = Callable[..., None]


def seconds(products: Products, given: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        products(*given)
    return (time.perf_counter() - start) / calls


def measure(forms: dict[str, Products]) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for columns, k in SIZES:
        w = generator.standard_normal((k, columns), np.float32)
        for rows in ROWS:
            x = generator.standard_normal((rows, k), np.float32)
            given = (x, w, np.empty((rows, columns), np.float32), 0, columns)
            work = rows * columns * k
            calls, turns = max(1, 10_000_000 // work), 2 if work > 1 << 32 else 15
            best: dict[str, float] = {}
            for _ in range(turns):
                for name, products in forms.items():
                    best[name] = min(best.get(name, np.inf), seconds(products, given, calls))
            row = {"rows": rows, "N": columns, "K": k}
            row |= {name: round(work / best[name] / 1e9, 2) for name in forms}
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def older(path: Path) -> Products:
    spec = importlib.util.spec_from_file_location("older_loops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where numba looks for it
    spec.loader.exec_module(module)
    return module.products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--machine", default=platform.machine())
    parser.add_argument("--before", type=Path, metavar="LOOPS.py")
    args = parser.parse_args()
    forms: dict[str, Products] = {"now": loops.products}
    if args.before is not None:
        forms["before"] = older(args.before)
    result = {
        "machine": args.machine,
        "numba": numba.__version__,
        "lanes": micro.LANES,
        "columns": micro.WIDTH,
        "unit": "1e9 multiply-adds per second",
        "rows": measure(forms),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
