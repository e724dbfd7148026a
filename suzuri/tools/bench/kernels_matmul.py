"""matmul and grouped_gemm at every product of Inkling and Inkling-Small, beside the vendor's.

The vendor's (torch.mm, torch._grouped_mm) are the free version: no promise about bits. Calls walk
over enough copies of the weight to leave none in the L2. `same_bits` compares the op with our
kernel alone (rule 1 of docs/exactness.md). Needs a GPU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.matmul import matmul
from suzuri.model.presets import DOCUMENTS
from suzuri.tools.bench.timing import L2_BYTES, graph_us

MODELS = ("inkling", "inkling-small")
ROWS = (1, 8, 64, 256, 1024, 8192)
MOST_LOGITS = 1024
"""Rows of the head: nobody asks for the logits of a whole prompt."""
EXPERTS = (64, 256)
REPLAYS = 7
BF16 = torch.bfloat16
# torch 2.11 has no public name for it.
grouped_mm: Callable[..., Tensor] = attrgetter("_grouped_mm")(torch)
DEVICE = torch.device("cuda")


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


def _row(
    what: str, size: dict[str, int], us: float, free_us: float, num_bytes: int
) -> dict[str, Any]:
    rows = size.get("tokens", size["rows"])
    return {
        "case": f"{what}, {rows} tokens",
        "what": what,
        **size,
        "dtype": "bfloat16",
        "us": us,
        "timing": "graph",
        "free_us": free_us,
        "bytes": num_bytes,
        "flops": 2 * size["rows"] * size["n"] * size["k"],
    }


def plain(what: str, n: int, k: int) -> Iterator[dict[str, Any]]:
    """One product at every number of rows."""
    from suzuri.kernels.matmul.kernel import ours

    is_fp32 = what in ("router", "head")
    out_dtype, scale = (torch.float32 if is_fp32 else BF16), (1 / 24 if what == "head" else 1.0)
    copies = max(2, min(12, L2_BYTES // (2 * n * k) + 1))
    weights = [torch.randn(n, k, device=DEVICE, dtype=BF16) / k**0.5 for _ in range(copies)]
    for m in ROWS:
        if what == "head" and m > MOST_LOGITS:
            continue
        x = torch.randn(m, k, device=DEVICE, dtype=BF16)
        product: Callable[..., Tensor] = ours if what == "router" else _matmul
        calls = [partial(product, x, w, scale, out_dtype) for w in weights]
        if m >= MOST_LOGITS:
            calls = calls[:2]
        free = [partial(torch.mm, x, w.t()) for w in weights[: len(calls)]]
        same = torch.equal(calls[0](), ours(x, weights[0], scale, out_dtype))
        num_bytes = 2 * (n * k + m * k) + m * n * out_dtype.itemsize
        us, free_us = (graph_us(one, DEVICE, REPLAYS) for one in (calls, free))
        yield _row(what, {"rows": m, "n": n, "k": k}, us, free_us, num_bytes) | {"same_bits": same}


def _matmul(x: Tensor, w: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    return matmul(x, w, scale=scale, out_dtype=out_dtype)


def grouped(routed: int, what: str, f: int, k: int) -> Iterator[dict[str, Any]]:
    """`routed` experts of which each token takes 6 at random, and 2 that all tokens take."""
    g = torch.Generator("cuda").manual_seed(0)
    experts = routed + 2
    weight = torch.empty(experts, f, k, device=DEVICE, dtype=BF16)
    for expert in weight:
        expert.normal_(0, k**-0.5, generator=g)
    for tokens in ROWS:
        chosen = torch.rand(tokens, routed, generator=g, device=DEVICE).argsort(-1)[:, :6]
        shared = torch.tensor([routed, routed + 1], device=DEVICE).expand(tokens, 2)
        counts = torch.bincount(torch.cat([chosen, shared], 1).flatten(), minlength=experts)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        ends, used = offsets[1:].to(torch.int32), int((counts > 0).sum())
        rows = 8 * tokens
        x = torch.randn(rows, k, device=DEVICE, dtype=BF16, generator=g)
        ours = partial(grouped_gemm, x, weight, offsets, out_dtype=BF16)
        free = partial(grouped_mm, x, weight.transpose(1, 2), offs=ends)
        us, free_us = (graph_us([one] * 2, DEVICE, REPLAYS) for one in (ours, free))
        num_bytes = 2 * (used * f * k + rows * k + rows * f)
        size = {"tokens": tokens, "rows": rows, "experts_used": used, "n": f, "k": k}
        yield _row(f"{what}, {routed} experts", size, us, free_us, num_bytes)


def product_cells(op: str) -> Iterator[dict[str, Any]]:
    """The sweep of one op: matmul or grouped_gemm; nothing for others."""
    for model in MODELS if op in ("matmul", "grouped_gemm") else ():
        text = DOCUMENTS[model]["text_config"]
        hidden, width = text["hidden_size"], text["intermediate_size"]
        if op == "matmul":
            for what, n, k in shapes(text):
                yield from (_named(model, one) for one in plain(what, n, k))
                torch.cuda.empty_cache()
            continue
        for routed in EXPERTS:
            for what, f, k in (("gate and up", 2 * width, hidden), ("down", hidden, width)):
                yield from (_named(model, one) for one in grouped(routed, what, f, k))
                torch.cuda.empty_cache()


def _named(model: str, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "model": model, "case": f"{model}: {row['case']}"}
