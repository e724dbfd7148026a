"""Decoding on a CPU: time per step by batch and threads, per op, and against transformers.

    python benchmarks/cpu_decode.py tests/golden/base OUT.json --machine "2-core x86-64 CPU" \
        --transformers PYTHON

The folder holds the checkpoint twice, original/ and transformers/. PYTHON is an interpreter that
has transformers with the Inkling model; its generate runs the same weights, prompts and threads in
turn with ours, and only the ratios of one run mean anything on a shared machine. Beside the wall
clock the CPU time of the process is given, which grows less when others take the cores. fp32,
prompts of 32 tokens, 64 new ones; transformers' step includes its argmax, ours its head.
"""

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from suzuri.kernels import dispatch
from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights

BATCHES, THREADS = (1, 16, 64), (1, 2)
PROMPT, NEW = 32, 64
OPS = {
    "attention": ("attention_prologue", "paged_attention"),
    "short_conv": ("short_conv",),
    "linear": ("matmul", "rms_norm"),
    "moe": ("moe_experts", "router", "swiglu"),
    "decoder": ("embedding", "matmul"),
}
GENERATE = """
import json, sys, time, torch
from transformers.models.inkling import modeling_inkling as m
folder, batch, threads, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
model = m.InklingForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.randint(0, 290, (batch, prompt), generator=torch.Generator().manual_seed(0))
def run(n):
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                   max_new_tokens=n, min_new_tokens=n, eos_token_id=None, pad_token_id=0)
with torch.no_grad():
    run(4)
    wall, cpu = time.perf_counter(), time.process_time()
    run(new)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall_ms": 1e3 * wall / new, "cpu_ms": 1e3 * cpu / new}))
"""


class Decoding:
    """Greedy decoding of `batch` random prompts, every step timed."""

    def __init__(self, model: Inkling, batch: int) -> None:
        self.model, self.batch = model, batch
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 290, (batch, PROMPT), generator=generator).tolist()

    def run(self) -> dict[str, float]:
        """Milliseconds: of the prefill, and the median of a decode step and its head."""
        config = self.model.config
        cache = SequenceCache(
            config,
            decoder_attentions(config),
            num_sequences=self.batch,
            max_tokens=PROMPT + NEW,
            dtype=torch.float32,
            undo=1,
        )
        members = list(range(self.batch))
        tokens, first = self.ids, 0
        walls: list[float] = []
        cpus: list[float] = []
        while first < PROMPT + NEW:
            firsts, sizes = [first] * self.batch, [len(row) for row in tokens]
            view = cache.view(members, firsts, sizes)
            batch = pack(tokens, first_positions=firsts, cache=view)
            wall, cpu = time.perf_counter(), time.process_time()
            h_ND = self.model.decoder(batch)
            logits_NV = self.model.decoder.logits(h_ND[batch.seq_starts_S1[1:] - 1])
            walls.append(1e3 * (time.perf_counter() - wall))
            cpus.append(1e3 * (time.process_time() - cpu))
            first += sizes[0]
            tokens = logits_NV.argmax(-1)[:, None].tolist()
        return {
            "prefill_wall_ms": walls[0],
            "prefill_cpu_ms": cpus[0],
            "wall_ms": statistics.median(walls[1:]),
            "cpu_ms": statistics.median(cpus[1:]),
        }


def per_op(model: Inkling, batch: int) -> dict[str, dict[str, float]]:
    """CPU milliseconds per decode step and calls of each op, summed over the layers."""
    spent: dict[str, list[float]] = {}
    originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def timed(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            start = time.process_time()
            result = op(*args, **words)
            spent.setdefault(name, []).append(time.process_time() - start)
            return result

        return call

    for file, names in OPS.items():
        module = importlib.import_module(f"suzuri.model.{file}")
        for name in names:
            originals.append((module, name, getattr(module, name)))
            setattr(module, name, timed(name, getattr(module, name)))
    Decoding(model, batch).run()
    for module, name, op in originals:
        setattr(module, name, op)
    # The prefill's calls come first and are left out.
    steps = NEW
    return {
        name: {
            "calls": len(times) // (steps + 1),
            "cpu_ms": 1e3 * sum(times[len(times) // (steps + 1) :]) / steps,
        }
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    }


def load(folder: Path) -> Inkling:
    model = Inkling(ModelConfig.from_file(folder), dtype=torch.float32)
    load_weights(model, folder, want=PARTS)
    return model.requires_grad_(False)


def generate(python: str, folder: Path, batch: int, threads: int) -> dict[str, float]:
    words = [python, "-c", GENERATE, str(folder), *map(str, (batch, threads, PROMPT, NEW))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, python: str | None) -> list[dict[str, Any]]:
    model = load(folder / "original")
    rows: list[dict[str, Any]] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        for batch in BATCHES:
            decoding = Decoding(model, batch)
            decoding.run()
            row: dict[str, Any] = {"threads": threads, "batch": batch, "ours": decoding.run()}
            with dispatch.force("reference"):
                row["references"] = decoding.run()
            if python is not None:
                theirs = generate(python, folder / "transformers", batch, threads)
                row["transformers"] = theirs
                for clock in ("wall_ms", "cpu_ms"):
                    row[f"ratio_{clock[:-3]}"] = row["ours"][clock] / theirs[clock]
            print(json.dumps(row), flush=True)
            rows.append(row)
    torch.set_num_threads(1)
    for batch in BATCHES:
        rows.append({"threads": 1, "batch": batch, "ops": per_op(model, batch)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--machine", default=platform.machine())
    parser.add_argument("--transformers", metavar="PYTHON")
    args = parser.parse_args()
    with torch.no_grad():
        rows = measure(args.folder, args.transformers)
    result = {
        "machine": args.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "prompt": PROMPT,
        "new_tokens": NEW,
        "dtype": "float32",
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
