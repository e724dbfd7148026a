"""Time of the Triton attention kernels at Inkling's shapes, bf16, and the exactness price.

Prefill: CUDA events around each of many runs, L2 flushed before it, median. Paged cells: replays of
a CUDA graph over disjoint sets of pages (1.5 GB in all, or 64 sets where that is less), so that
nothing sits in L2; median. TFLOP/s count 4 * heads * 128 * visible pairs; TB/s count every visible
K and V byte once per KV head. "free" is the same prefill kernel without chunks and with row sums in
the compiler's order. Writes JSON:

    python benchmarks/kernels/attention.py benchmarks/results/attention-h200.json
"""

import dataclasses
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from suzuri.kernels.paged_attention import kernel as paged
from suzuri.kernels.relative_attention import kernel as rows

HEADS, CHANNELS, WIDTH, PAGE = 64, 128, 16, 128
LAYERS = {"global": (8, 1024, None), "local": (16, 512, 512)}
"""KV heads, reach of the bias, window."""
PREFILL = {"1 x 8192": [8192], "8 x 1024": [1024] * 8}
DECODE = [(1, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 8192), (1, 65536), (8, 65536)]
DECODE += [(64, 65536), (1, 262144), (1, 1048576)]
VERIFY = [(1, 8192), (8, 65536), (64, 8192)]
MIXED = {
    "2000 rows at 8K beside 40 decodes at 8K": [(2000, 8192)] + [(1, 8192)] * 40,
    "2048 rows at 64K": [(2048, 65536)],
    "64 rows at 64K": [(64, 65536)],
    "1 decode at 256K beside 63 at 4K": [(1, 262144)] + [(1, 4096)] * 63,
}
POOL_BYTES, MOST_SETS, LEAST_SETS_BYTES = 3 << 29, 64, 1 << 28


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def pairs_of(rows_and_ends: Sequence[tuple[int, int]], window: int | None) -> int:
    """Visible (row, key) pairs of sequences of `rows` new rows that end at position `end`."""
    total = 0
    for num, end in rows_and_ends:
        if window is None:
            total += num * (end - num) + num * (num + 1) // 2
        else:
            total += sum(min(p + 1, window) for p in range(end - num, end))
    return total


def seen_of(rows_and_ends: Sequence[tuple[int, int]], window: int | None) -> int:
    """Keys that any row sees."""
    if window is None:
        return sum(end for _, end in rows_and_ends)
    return sum(min(end, window + num - 1) for num, end in rows_and_ends)


def median_us(run: Callable[[], object], repeats: int = 20) -> float:
    """Each run alone, after a flush of L2."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def graph_us(runs: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Per run, of a graph that holds all of them."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(runs))
    return statistics.median(times)


def prefill(layer: str, lengths: Sequence[int], **changes: Any) -> Callable[[], Tensor]:
    """A call of relative_attention; `changes` are fields of Launch."""
    kv_heads, reach, window = LAYERS[layer]
    total = sum(lengths)
    q, k = normal(total, HEADS, CHANNELS, scale=CHANNELS**0.5), normal(total, kv_heads, CHANNELS)
    v, r, proj = normal(*k.shape), normal(total, HEADS, WIDTH), normal(WIDTH, reach)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    launch = rows.launch_of(rows.shape_of(q, kv_heads, proj, window), tma=rows.can_tma(k, v))
    launch = dataclasses.replace(launch, **changes)
    return lambda: rows.relative_attention(q, k, v, r, proj, starts, window, launch)


def decode(
    layer: str, rows_and_ends: Sequence[tuple[int, int]], **changes: Any
) -> list[Callable[[], Tensor]]:
    """Calls of paged_attention over disjoint sets of pages; `changes` are fields of Plan."""
    kv_heads, reach, window = LAYERS[layer]
    total, longest = sum(n for n, _ in rows_and_ends), max(end for _, end in rows_and_ends)
    q, r = normal(total, HEADS, CHANNELS, scale=CHANNELS**0.5), normal(total, HEADS, WIDTH)
    proj = normal(WIDTH, reach)
    ranges = [
        (max(0, end - n - (window or end)) // PAGE, -(-end // PAGE)) for n, end in rows_and_ends
    ]
    per_set = sum(b - a for a, b in ranges)
    page_bytes = 2 * PAGE * kv_heads * CHANNELS * 2
    sets = max(1, min(MOST_SETS, POOL_BYTES // (per_set * page_bytes)))
    k_pages = torch.empty(sets * per_set, PAGE, kv_heads, CHANNELS, dtype=q.dtype, device="cuda")
    v_pages = torch.empty_like(k_pages)
    for pages in (k_pages, v_pages):
        for part in pages.split(4096):
            part.normal_()
    order = torch.randperm(sets * per_set, device="cuda").view(sets, per_set)
    firsts = torch.tensor([end - n for n, end in rows_and_ends], device="cuda")
    starts = torch.tensor([0, *(n for n, _ in rows_and_ends)], device="cuda").cumsum(0)
    columns = -(-longest // PAGE)
    shape = rows.shape_of(q, kv_heads, proj, window)
    plan = paged.plan_of(
        shape, total, len(firsts), columns * PAGE, tma=paged.can_tma_pages(k_pages, v_pages)
    )
    plan = dataclasses.replace(plan, **changes)
    calls: list[Callable[[], Tensor]] = []
    for pages in order:
        table = torch.full((len(firsts), columns), -1, dtype=torch.int64, device="cuda")
        at = 0
        for s, (a, b) in enumerate(ranges):
            table[s, a:b] = pages[at : at + b - a]
            at += b - a
        calls.append(
            lambda table=table: paged.paged_attention(
                q, r, proj, k_pages, v_pages, table, firsts, starts, window, plan
            )
        )
    return calls


def prefill_cell(layer: str, name: str) -> dict[str, Any]:
    lengths = PREFILL[name]
    window = LAYERS[layer][2]
    flop = 4 * HEADS * CHANNELS * pairs_of([(n, n) for n in lengths], window)
    exact = median_us(prefill(layer, lengths))
    free = median_us(prefill(layer, lengths, exact=False))
    return {
        "cell": f"{layer} prefill {name}",
        "us": exact,
        "free_us": free,
        "price": exact / free - 1,
        "tflops": flop / exact / 1e6,
    }


def paged_cell(layer: str, name: str, work: Sequence[tuple[int, int]]) -> dict[str, Any]:
    kv_heads, _, window = LAYERS[layer]
    us = graph_us(decode(layer, work))
    torch.cuda.empty_cache()
    return {
        "cell": f"{layer} {name}",
        "us": us,
        "tb_per_s": 4 * kv_heads * CHANNELS * seen_of(work, window) / us / 1e6,
        "tflops": 4 * HEADS * CHANNELS * pairs_of(work, window) / us / 1e6,
    }


def cells() -> list[dict[str, Any]]:
    found = [prefill_cell(layer, name) for layer in LAYERS for name in PREFILL]
    for batch, context in DECODE:
        work = [(1, context)] * batch
        found.append(paged_cell("global", f"decode {batch} x {context}", work))
    for batch in (1, 8, 64):
        found.append(paged_cell("local", f"decode {batch} x 8192", [(1, 8192)] * batch))
    for batch, context in VERIFY:
        work = [(9, context)] * batch
        found.append(paged_cell("global", f"verify {batch} x {context}", work))
        found.append(paged_cell("local", f"verify {batch} x {context}", work))
    for name, work in MIXED.items():
        found += [paged_cell(layer, name, work) for layer in LAYERS]
    return found


def main() -> None:
    torch.manual_seed(0)
    found = cells()
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
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    for cell in found:
        numbers = "  ".join(f"{k} {v:.4g}" for k, v in cell.items() if k != "cell")
        print(f"{cell['cell']:50} {numbers}")


if __name__ == "__main__":
    main()
