"""matmul and grouped_gemm at the shapes of Inkling and Inkling-Small, beside the vendor's.

The sweep is that of `suzuri bench kernels matmul grouped_gemm` (kernels_matmul.py of
suzuri/tools/bench says how it is timed), without the tests before it and in the form of
benchmarks/results/kernels-matmul.json. "limit" is the larger of bytes / 4.2 TB/s and operations /
700 TFLOP/s. Needs a GPU; writes JSON:

    python benchmarks/kernels/matmul.py benchmarks/results/kernels-matmul.json
"""

import argparse
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from suzuri.kernels.matmul import buckets
from suzuri.tools.bench.kernels_matmul import product_cells
from suzuri.tools.bench.record import commit
from suzuri.tools.bench.timing import needed_gpu

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.2e12, 700e12
SIZES = ("tokens", "rows", "experts_used", "n", "k")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    us, free_us, num_bytes, flops = (row[name] for name in ("us", "free_us", "bytes", "flops"))
    limit = 1e6 * max(num_bytes / BYTES_PER_SECOND, flops / OPERATIONS_PER_SECOND)
    found = {"model": row["model"], "what": row["what"]}
    found |= {name: row[name] for name in SIZES if name in row}
    found |= {
        "us": round(us, 2),
        "free_us": round(free_us, 2),
        "limit_us": round(limit, 2),
        "share_of_limit": round(limit / us, 3),
        "price": round(us / free_us - 1, 3),
        "terabytes_per_second": round(num_bytes / us / 1e6, 3),
        "teraflops": round(flops / us / 1e6, 1),
    }
    return found | ({"same_bits": row["same_bits"]} if "same_bits" in row else {})


def measure() -> Iterator[dict[str, Any]]:
    for op in ("matmul", "grouped_gemm"):
        yield from map(judged, product_cells(op))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    target: Path = parser.parse_args().out
    device = needed_gpu()
    rows: list[dict[str, Any]] = []
    for one in measure():
        rows.append(one)
        print(
            f"{one['model']:14s} {one['what']:24s} {one.get('tokens', one['rows']):5d} "
            f"{one['us']:9.1f} us  {100 * one['share_of_limit']:5.1f} % of the limit  "
            f"{100 * one['price']:+6.1f} %{'' if one.get('same_bits', True) else '  OTHER BITS'}",
            flush=True,
        )
    result = {
        "what": "matmul and grouped_gemm beside the vendor's products",
        "limits": {"bytes_per_second": BYTES_PER_SECOND, "operations": OPERATIONS_PER_SECOND},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/kernels/matmul.py OUT",
        "fingerprint": buckets.fingerprint(device),
        "rows": rows,
    }
    target.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
