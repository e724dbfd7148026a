"""The attention kernels at the shapes of Inkling and Inkling-Small, bf16: prefill, decode, verify
windows, mixed steps.

Paged cells run over disjoint sets of pages (1.5 GB in all, or 64 sets where that is less), so that
nothing sits in L2. FLOPs count 4 * heads * 128 * visible pairs, bytes every visible K and V byte
once per KV head. "free" is the same prefill kernel without chunks and with row sums in the
compiler's order. Needs a GPU.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from suzuri.tools.bench.timing import events_us, graph_us
from suzuri.tools.bench.weights import fill_normal

CHANNELS, WIDTH, PAGE = 128, 16, 128


class Layer(NamedTuple):
    """Attention of one kind of layer; `reach` of the bias, `window` of the keys."""

    heads: int
    kv_heads: int
    reach: int
    window: int | None


INKLING = {"global": Layer(64, 8, 1024, None), "local": Layer(64, 16, 512, 512)}
SMALL = {"Small global": Layer(32, 8, 1024, None), "Small local": Layer(32, 8, 512, 512)}
LAYERS = {**INKLING, **SMALL}
PREFILL = {"1 x 8192": [8192], "8 x 1024": [1024] * 8}
DECODE = (
    *((1, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 8192)),
    *((1, 65536), (8, 65536), (64, 65536), (1, 262144), (1, 1048576)),
)
DECODE_LOCAL = ((1, 8192), (8, 8192), (64, 8192))
VERIFY = [(1, 8192), (8, 65536), (64, 8192)]
MIXED = {
    "2000 rows at 8K beside 40 decodes at 8K": [(2000, 8192)] + [(1, 8192)] * 40,
    "2048 rows at 64K": [(2048, 65536)],
    "64 rows at 64K": [(64, 65536)],
    "1 decode at 256K beside 63 at 4K": [(1, 262144)] + [(1, 4096)] * 63,
}
POOL_BYTES, MOST_SETS = 3 << 29, 64
PREFILL_REPEATS, GRAPH_REPEATS = 20, 7
DEVICE = torch.device("cuda")


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


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


def prefill(layer: str, lengths: Sequence[int], **changes: Any) -> Callable[[], Tensor]:
    """A call of relative_attention; `changes` are fields of Launch."""
    from suzuri.kernels.relative_attention import kernel as rows

    heads, kv_heads, reach, window = LAYERS[layer]
    total = sum(lengths)
    q, k = normal(total, heads, CHANNELS, scale=CHANNELS**0.5), normal(total, kv_heads, CHANNELS)
    v, r, proj = normal(*k.shape), normal(total, heads, WIDTH), normal(WIDTH, reach)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    launch = rows.launch_of(rows.shape_of(q, kv_heads, proj, window), tma=rows.can_tma(k, v))
    launch = dataclasses.replace(launch, **changes)
    return lambda: rows.relative_attention(q, k, v, r, proj, starts, window, launch)


def paged(
    layer: str, rows_and_ends: Sequence[tuple[int, int]], **changes: Any
) -> list[Callable[[], Tensor]]:
    """Calls of paged_attention over disjoint sets of pages; `changes` are fields of Plan."""
    from suzuri.kernels.paged_attention import kernel as pages_kernel
    from suzuri.kernels.relative_attention import kernel as rows

    heads, kv_heads, reach, window = LAYERS[layer]
    total, longest = sum(n for n, _ in rows_and_ends), max(end for _, end in rows_and_ends)
    q, r = normal(total, heads, CHANNELS, scale=CHANNELS**0.5), normal(total, heads, WIDTH)
    proj = normal(WIDTH, reach)
    ranges = [
        (max(0, end - n - (window or end)) // PAGE, -(-end // PAGE)) for n, end in rows_and_ends
    ]
    per_set = sum(b - a for a, b in ranges)
    page_bytes = 2 * PAGE * kv_heads * CHANNELS * 2
    sets = max(1, min(MOST_SETS, POOL_BYTES // (per_set * page_bytes)))
    k_pages = torch.empty(sets * per_set, PAGE, kv_heads, CHANNELS, dtype=q.dtype, device=DEVICE)
    v_pages = torch.empty_like(k_pages)
    generator = torch.Generator("cuda").manual_seed(0)
    for pages in (k_pages, v_pages):
        fill_normal(pages, generator)
    order = torch.randperm(sets * per_set, device=DEVICE).view(sets, per_set)
    firsts = torch.tensor([end - n for n, end in rows_and_ends], device=DEVICE)
    starts = torch.tensor([0, *(n for n, _ in rows_and_ends)], device=DEVICE).cumsum(0)
    columns = -(-longest // PAGE)
    shape = rows.shape_of(q, kv_heads, proj, window)
    plan = pages_kernel.plan_of(
        shape,
        total,
        len(firsts),
        columns * PAGE,
        tma=pages_kernel.can_tma_pages(k_pages, v_pages),
    )
    plan = dataclasses.replace(plan, **changes)
    calls: list[Callable[[], Tensor]] = []
    for one_set in order:
        table = torch.full((len(firsts), columns), -1, dtype=torch.int64, device=DEVICE)
        at = 0
        for s, (a, b) in enumerate(ranges):
            table[s, a:b] = one_set[at : at + b - a]
            at += b - a
        calls.append(
            lambda table=table: pages_kernel.paged_attention(
                q, r, proj, k_pages, v_pages, table, firsts, starts, window, plan
            )
        )
    return calls


def _prefill_cell(layer: str, name: str) -> dict[str, Any]:
    lengths, (heads, kv_heads, _, window) = PREFILL[name], LAYERS[layer]
    total = sum(lengths)
    exact = events_us(prefill(layer, lengths), DEVICE, PREFILL_REPEATS)
    free = events_us(prefill(layer, lengths, exact=False), DEVICE, PREFILL_REPEATS)
    return {
        "case": f"{layer} prefill {name}",
        "dtype": "bfloat16",
        "us": exact,
        "timing": "events",
        "free_us": free,
        "bytes": 2 * total * CHANNELS * (2 * heads + 2 * kv_heads) + 2 * total * heads * WIDTH,
        "flops": 4 * heads * CHANNELS * pairs_of([(n, n) for n in lengths], window),
    }


def _paged_cell(layer: str, name: str, work: Sequence[tuple[int, int]]) -> dict[str, Any]:
    heads, kv_heads, _, window = LAYERS[layer]
    us = graph_us(paged(layer, work), DEVICE, GRAPH_REPEATS)
    torch.cuda.empty_cache()
    return {
        "case": f"{layer} {name}",
        "dtype": "bfloat16",
        "us": us,
        "timing": "graph",
        "free_us": None,
        "bytes": 4 * kv_heads * CHANNELS * seen_of(work, window),
        "flops": 4 * heads * CHANNELS * pairs_of(work, window),
    }


def attention_cells(op: str, layers: Mapping[str, Layer] = LAYERS) -> Iterator[dict[str, Any]]:
    """The sweep of one op, relative_attention or paged_attention, over kinds of layers; nothing
    for other ops."""
    if op == "relative_attention":
        for layer in layers:
            yield from (_prefill_cell(layer, name) for name in PREFILL)
    for layer, shape in layers.items() if op == "paged_attention" else ():
        decode = DECODE if shape.window is None else DECODE_LOCAL
        cells = {f"decode {batch} x {context}": [(1, context)] * batch for batch, context in decode}
        for batch, context in VERIFY:
            cells[f"verify {batch} x {context}"] = [(9, context)] * batch
        yield from (_paged_cell(layer, name, work) for name, work in (cells | MIXED).items())
