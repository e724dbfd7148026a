"""Head and draw on a GPU: straight from hidden rows (draw_tokens) against logits, then the sampler.

    python scripts/reproduce/head.py --out head.json

Of 1, 8, 64 and 256 rows with a temperature, with both kinds of log-probs, and with top_p (whose
logits are made 32 rows at a time): microseconds of each way, the most memory that it took beside
its inputs, and whether tokens and log-probs have equal bits. Weights and rows are random; the head
is as large as Inkling's. Exits with 1 where a bit differs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suzuri.engine.sampler import Sampled, Sampler
from suzuri.engine.sampling_params import SamplingParams, resolve
from suzuri.engine.sampling_rows import RowState
from suzuri.kernels.matmul import matmul
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.bench.record import gpu_name
from suzuri.tools.bench.timing import needed_gpu

ROWS = (1, 8, 64, 256)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probs": {"logprobs": 0, "sampled_logprobs": True},
    "top_p": {"top_p": 0.9},
}
SCALE = 1 / 24
REPEATS = 20


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Median of the device's time and most memory, after two calls that are left out."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before
    times: list[float] = []
    for _ in range(REPEATS):
        # The host is ahead by this, so that its launches are not what is measured.
        torch.cuda._sleep(2_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return {"us": round(statistics.median(times), 1), "mib": round(held / 2**20, 1)}


def same(a: Sampled, b: Sampled) -> bool:
    """Whether ids and log-probs have the same bits."""

    def bits(x: Tensor) -> Tensor:
        return x.nan_to_num(7.0).view(torch.int32)

    pairs = [(a.raw, b.raw), (a.sampled, b.sampled)]
    if not torch.equal(a.ids_S, b.ids_S):
        return False
    return all(
        torch.equal(bits(x.logprob_S), bits(y.logprob_S)) if x and y else x is y for x, y in pairs
    )


def measured(rows: int, unembed_VD: Tensor, kind: str) -> dict[str, Any]:
    """One row of the table."""
    device = unembed_VD.device
    num_ids, width = unembed_VD.shape
    h_SD = torch.randn(rows, width, device=device, dtype=unembed_VD.dtype)
    params = SamplingParams(temperature=0.8, **KINDS[kind])
    sampling = resolve(params, FullVocabulary(), num_rows=num_ids, eos_token_id=None)
    states = [
        RowState(sampling=sampling, seed=i, position=7 * i, num_output=0) for i in range(rows)
    ]
    sampler = Sampler(num_ids=num_ids, max_slots=1, device=device)
    step, params_S = sampler.step(states), sampler.rows(states)

    def fused() -> Sampled:
        return sampler.draw(h_SD, unembed_VD, SCALE, step)

    def head() -> Tensor:
        return matmul(h_SD, unembed_VD, scale=SCALE, out_dtype=torch.float32)

    def unfused() -> Sampled:
        return sampler.sample(head(), params_S)

    return {
        "rows": rows,
        "kind": kind,
        "equal": same(fused(), unfused()),
        "fused": timed(fused),
        "unfused": timed(unfused),
        "head_alone": timed(head),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=200058)
    parser.add_argument("--width", type=int, default=6144)
    args = parser.parse_args()
    needed_gpu()
    torch.manual_seed(1)
    unembed_VD = torch.randn(args.vocabulary, args.width, device="cuda", dtype=torch.bfloat16)
    found: list[dict[str, Any]] = []
    print("rows kind        fused us  unfused us     head us  fused MiB  unfused MiB  equal")
    for kind in KINDS:
        for rows in ROWS:
            one = measured(rows, unembed_VD, kind)
            found.append(one)
            print(
                f"{rows:4} {kind:9} {one['fused']['us']:10} "
                f"{one['unfused']['us']:11} {one['head_alone']['us']:11} {one['fused']['mib']:10} "
                f"{one['unfused']['mib']:12}  {one['equal']}",
                flush=True,
            )
    if args.out:
        what = {
            "what": "head and draw: hidden rows to tokens (fused) against logits, then the sampler",
            "gpu": gpu_name(unembed_VD.device),
            "torch": torch.__version__,
            "vocabulary": args.vocabulary,
            "width": args.width,
            "cells": found,
        }
        args.out.write_text(json.dumps(what, indent=1) + "\n")
    sys.exit(0 if all(one["equal"] for one in found) else 1)


if __name__ == "__main__":
    main()
