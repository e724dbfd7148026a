"""From how many new rows on a sequence's attention is taken by tiles of rows, not by split keys.

    python scripts/reproduce/split_or_rows.py --out split-or-rows.json

One sequence of some new rows behind some context, in the layers of Inkling and Inkling-Small, both
ways: what `FEW_TILES` of paged_attention rests on. Needs a GPU.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from suzuri.kernels.paged_attention import kernel
from suzuri.tools.bench.kernels_attention import DEVICE, LAYERS, paged
from suzuri.tools.bench.record import header, write
from suzuri.tools.bench.timing import graph_us, needed_gpu

ROWS = (48, 80, 96, 128, 160, 256, 512, 1024, 2048)
CONTEXTS = (1024, 8192, 65536)
FEW, REPEATS = 160, 5
"""Rows up to which every context is of interest; beyond, the one that is the rows alone."""


def measured(layer: str, rows: int, end: int) -> dict[str, Any]:
    """Microseconds of a call, by its kind."""
    found: dict[str, Any] = {"layer": layer, "rows": rows, "context": end}
    for name, few in (("split_us", 1 << 30), ("rows_us", -(1 << 30))):
        kernel.FEW_TILES = few  # before the plan is made
        found[name] = graph_us(paged(layer, [(rows, end)]), DEVICE, REPEATS)
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    needed_gpu()
    document = header("split or rows", DEVICE, {"few_tiles": kernel.FEW_TILES}) | {"cells": []}
    for layer, shape in LAYERS.items():
        for rows in ROWS:
            ends = CONTEXTS if rows <= FEW else (rows,)
            for end in ends if shape.window is None else ends[:1]:
                document["cells"].append(measured(layer, rows, end))
                write(options.out, document)
                print(json.dumps(document["cells"][-1]), flush=True)


if __name__ == "__main__":
    main()
