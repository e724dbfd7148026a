"""Which CPU matrix products give a row the same bits whatever rows are beside it.

Counts rows whose fp64 accumulators differ from the row computed alone, over M = 1..70 and three
thread counts; the rows cancel (half of each sum takes the other half away), so that the summation
order shows. Writes JSON:

    python benchmarks/kernels/cpu_row_invariance.py benchmarks/results/cpu-row-invariance.json
"""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from suzuri.kernels import exact

SHAPES = ((64, 64), (72, 211), (512, 512), (1000, 300), (3072, 96), (6144, 64), (4096, 258))
THREADS = (1, 2, 8)
ROWS = 70


def padded(k_chunk: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """fp64 with rows padded to 8 and K, N to 16, in chunks of `k_chunk` of K folded in order."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        m, k = x.shape
        x = torch.nn.functional.pad(x.double(), (0, -k % 16, 0, -m % 8))
        w = torch.nn.functional.pad(w.double(), (0, -k % 16, 0, -len(w) % 16))
        step = k_chunk or x.shape[1]
        total = x[:, :step] @ w[:, :step].T
        for first in range(step, x.shape[1], step):
            total = total + x[:, first : first + step] @ w[:, first : first + step].T
        return total[:m]

    return product


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain fp32": lambda x, w: x.float() @ w.float().T,
    "plain fp64": lambda x, w: x @ w.T,
    "fp64, padded": padded(None),
    "fp64, padded, K in 256": padded(256),
    "fp64, padded, K in 128": padded(128),
    "suzuri.kernels.exact.accumulators": exact.accumulators,
}


def inputs(k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k * 1000 + n)
    half = k // 2
    x = torch.randn(ROWS, k, generator=generator, dtype=torch.float64)
    w = torch.randn(n, k, generator=generator, dtype=torch.float64)
    noise = 1e-9 * torch.randn(ROWS, half, generator=generator, dtype=torch.float64)
    x[:, half : 2 * half] = -x[:, :half] * (1 + noise)
    w[:, half : 2 * half] = w[:, :half]
    return x, w


def unequal_rows(method: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> int:
    torch.set_num_threads(1)
    alone = torch.cat([method(x[i : i + 1], w) for i in range(ROWS)])
    count = 0
    for threads in THREADS:
        torch.set_num_threads(threads)
        for m in range(1, ROWS + 1):
            count += int((method(x[ROWS - m :], w) != alone[ROWS - m :]).any(1).sum())
    return count


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(target: Path) -> None:
    rows: list[dict[str, object]] = []
    for name, method in METHODS.items():
        counts = {
            f"K={k} N={n}": unequal_rows(method, *inputs(k, n))
            for k, n in track(SHAPES, description=name)
        }
        rows.append({"method": name, "unequal_rows": counts, "total": sum(counts.values())})
    checked = len(SHAPES) * len(THREADS) * ROWS * (ROWS + 1) // 2
    result = {
        "what": "rows whose bits differ from the row alone",
        "rows_checked_per_method": checked,
        "threads": THREADS,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/kernels/cpu_row_invariance.py OUT",
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "rows": rows,
    }
    target.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['method']:<36} {row['total']:>7} of {checked} rows differ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
