"""matmul and grouped_gemm at the shapes of Inkling and Inkling-Small, beside the vendor's products.

The vendor's (torch.mm, torch._grouped_mm) are the free version: no promise about bits. Times are
medians of replayed CUDA graphs that walk over enough copies of the weight to leave none in the L2.
"limit" is the larger of bytes / 4.2 TB/s and operations / 700 TFLOP/s; `same_bits` compares the op
with our kernel alone (rule 1 of docs/exactness.md). Needs a GPU; writes JSON:

    python benchmarks/kernels/matmul.py benchmarks/results/kernels-matmul.json
"""

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.matmul import buckets, matmul
from suzuri.kernels.matmul.kernel import ours
from suzuri.model.presets import DOCUMENTS

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.2e12, 700e12
ROWS = (1, 8, 64, 256, 1024, 8192)
MOST_LOGITS = 1024
"""Rows of the head: nobody asks for the logits of a whole prompt."""
L2_BYTES = 400 << 20
REPLAYS = 7
BF16 = torch.bfloat16


def shapes(text: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(what, rows of the weight, K) of every plain product of the model."""
    hidden, dense = text["hidden_size"], text["dense_intermediate_size"]
    for kind, prefix in (("local", "swa_"), ("global", "")):
        heads, groups = text[f"{prefix}num_attention_heads"], text[f"{prefix}num_key_value_heads"]
        head = text[f"{prefix}head_dim"]
        yield f"qkvr, {kind}", (heads + 2 * groups) * head + heads * text["d_rel"], hidden
    yield "attention out", hidden, text["num_attention_heads"] * text["head_dim"]
    yield "dense gate and up", 2 * dense, hidden
    yield "dense down", hidden, dense
    yield "router", text["n_routed_experts"] + text["n_shared_experts"], hidden
    yield "head", text["unpadded_vocab_size"], hidden


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `calls`, replayed as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def row(what: str, size: dict[str, int], us: float, free_us: float | None, num_bytes: int):
    operations = 2 * size["rows"] * size["n"] * size["k"]
    limit = 1e6 * max(num_bytes / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
    return {
        "what": what,
        **size,
        "us": round(us, 2),
        "free_us": free_us and round(free_us, 2),
        "limit_us": round(limit, 2),
        "share_of_limit": round(limit / us, 3),
        "price": free_us and round(us / free_us - 1, 3),
        "terabytes_per_second": round(num_bytes / us / 1e6, 3),
        "teraflops": round(operations / us / 1e6, 1),
    }


def plain(what: str, n: int, k: int) -> Iterator[dict[str, Any]]:
    is_fp32 = what in ("router", "head")
    out_dtype, scale = (torch.float32 if is_fp32 else BF16), (1 / 24 if what == "head" else 1.0)
    copies = max(2, min(12, L2_BYTES // (2 * n * k) + 1))
    weights = [torch.randn(n, k, device="cuda", dtype=BF16) / k**0.5 for _ in range(copies)]
    for m in ROWS:
        if what == "head" and m > MOST_LOGITS:
            continue
        x = torch.randn(m, k, device="cuda", dtype=BF16)
        product = ours if what == "router" else matmul_of
        calls = [partial(product, x, w, scale, out_dtype) for w in weights]
        if m >= MOST_LOGITS:
            calls = calls[:2]
        free = [partial(torch.mm, x, w.t()) for w in weights[: len(calls)]]
        same = torch.equal(calls[0](), ours(x, weights[0], scale, out_dtype))
        num_bytes = 2 * (n * k + m * k) + m * n * out_dtype.itemsize
        size = {"rows": m, "n": n, "k": k}
        yield row(what, size, microseconds(calls), microseconds(free), num_bytes) | {
            "same_bits": same
        }


def matmul_of(x: Tensor, w: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    return matmul(x, w, scale=scale, out_dtype=out_dtype)


def grouped(routed: int, what: str, f: int, k: int) -> Iterator[dict[str, Any]]:
    """`routed` experts of which each token takes 6 at random, and 2 that all tokens take."""
    g = torch.Generator("cuda").manual_seed(0)
    experts = routed + 2
    weight = torch.empty(experts, f, k, device="cuda", dtype=BF16)
    for expert in weight:
        expert.normal_(0, k**-0.5, generator=g)
    for tokens in ROWS:
        chosen = torch.rand(tokens, routed, generator=g, device="cuda").argsort(-1)[:, :6]
        shared = torch.tensor([routed, routed + 1], device="cuda").expand(tokens, 2)
        counts = torch.bincount(torch.cat([chosen, shared], 1).flatten(), minlength=experts)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        ends, used = offsets[1:].to(torch.int32), int((counts > 0).sum())
        rows = 8 * tokens
        x = torch.randn(rows, k, device="cuda", dtype=BF16, generator=g)
        us = microseconds([partial(grouped_gemm, x, weight, offsets, out_dtype=BF16)] * 2)
        free = partial(torch._grouped_mm, x, weight.transpose(1, 2), offs=ends)
        free_us = microseconds([free] * 2)
        num_bytes = 2 * (used * f * k + rows * k + rows * f)
        size = {"tokens": tokens, "rows": rows, "experts_used": used, "n": f, "k": k}
        yield row(f"{what}, {routed} experts", size, us, free_us, num_bytes)


def measure() -> Iterator[dict[str, Any]]:
    for name in ("inkling", "inkling-small"):
        text = DOCUMENTS[name]["text_config"]
        for what, n, k in shapes(text):
            yield from ({"model": name, **one} for one in plain(what, n, k))
            torch.cuda.empty_cache()
        hidden, width = text["hidden_size"], text["intermediate_size"]
        for routed in (64, 256):
            for what, f, k in (
                ("gate and up", 2 * width, hidden),
                ("down", hidden, width),
            ):
                yield from ({"model": name, **one} for one in grouped(routed, what, f, k))
                torch.cuda.empty_cache()


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@torch.inference_mode()
def main(target: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    for one in measure():
        rows.append(one)
        price = "" if one["price"] is None else f"{100 * one['price']:+6.1f} %"
        print(
            f"{one['model']:14s} {one['what']:24s} {one.get('tokens', one['rows']):5d} "
            f"{one['us']:9.1f} us  {100 * one['share_of_limit']:5.1f} % of the limit  {price}"
            f"{'' if one.get('same_bits', True) else '  OTHER BITS'}",
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
    main(Path(sys.argv[1]))
