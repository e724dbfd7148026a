"""Time of the Triton attention kernels at Inkling's shapes, bf16, and the exactness price.

The sweep is that of `suzuri bench kernels relative_attention paged_attention`
(suzuri/tools/bench/kernels_attention.py says how it is timed), without the tests before it and in
the form of benchmarks/results/attention-h200.json. Needs a GPU; writes JSON:

    python benchmarks/kernels/attention.py benchmarks/results/attention-h200.json
"""

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch
import triton

from suzuri.tools.bench.kernels_attention import INKLING, attention_cells
from suzuri.tools.bench.timing import needed_gpu


def cell(row: dict[str, Any]) -> dict[str, Any]:
    found = {"cell": row["case"], "us": row["us"]}
    if row["free_us"] is not None:
        found |= {"free_us": row["free_us"], "price": row["us"] / row["free_us"] - 1}
    else:
        found["tb_per_s"] = row["bytes"] / row["us"] / 1e6
    return found | {"tflops": row["flops"] / row["us"] / 1e6}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    target: Path = parser.parse_args().out
    needed_gpu()
    torch.manual_seed(0)
    ops = ("relative_attention", "paged_attention")
    found = [cell(row) for op in ops for row in attention_cells(op, INKLING)]
    document = {
        "what": "attention kernels, Inkling's shapes, bf16, one GPU",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/kernels/attention.py OUT",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cells": found,
    }
    target.write_text(json.dumps(document, indent=1) + "\n")
    for one in found:
        numbers = "  ".join(f"{k} {v:.4g}" for k, v in one.items() if k != "cell")
        print(f"{one['cell']:50} {numbers}")


if __name__ == "__main__":
    main()
