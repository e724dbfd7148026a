"""Training steps on the CPU: ours against a plain loop over transformers' model, in one run.

    python benchmarks/cpu_training.py --transformers-python /path/to/python --json OUT

The second interpreter needs torch and transformers 5.23 (and what its Inkling imports: scipy,
torchvision). Both train the same weights in fp32 with two threads on the same tokens: forward,
cross-entropy of the next token, backward, AdamW. Each side takes a few steps in turn, the first of
them untimed: after a rest a step takes longer, whoever takes it, and training does not rest. The
medians are compared, and the losses of all steps must agree. Cases: `base` (the golden checkpoint,
8 x 256 tokens) and `nano` (the shape of the small model, 4 x 256 tokens, random weights).

Ours runs as the command `suzuri` does, whose idle threads sleep (docs/training.md); transformers
with torch's defaults, or with `--passive` in the same way. CPU seconds are those of all threads.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "base"
THREADS = 2
REST = 0.5
"""Seconds between two turns: idle threads of the other process still spin for a while."""
STEPS = 4
"""Of a turn; the first is not timed."""
CASES = {"base": (8, 256), "nano": (4, 256)}
LEARNING_RATE = 1e-4


def tokens_of(case: str, rows: int) -> list[list[int]]:
    import random

    generator = random.Random(0)
    count, length = CASES[case]
    return [[generator.randrange(rows) for _ in range(length + 1)] for _ in range(count)]


def theirs() -> None:
    """Runs in the other interpreter: a line of stdin is a case, a folder and the number of rows,
    or a step; one line of JSON per line."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers.models.inkling import modeling_inkling

    torch.set_num_threads(THREADS)
    kind: Any = modeling_inkling.InklingForConditionalGeneration
    model: Any = None
    optimizer: Any = None
    ids = torch.zeros(0)
    rows = 0
    for line in sys.stdin:
        words = json.loads(line)
        start, busy = time.perf_counter(), time.process_time()
        loss = 0.0
        if "folder" in words:
            model = kind.from_pretrained(words["folder"], dtype=torch.float32).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
            rows = words["rows"]
            ids = torch.tensor(tokens_of(words["case"], rows))
        else:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            total = cross_entropy(logits[..., :rows].flatten(0, 1).float(), ids[:, 1:].flatten())
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = float(total.detach())
        answer = {"seconds": time.perf_counter() - start, "loss": loss}
        print(json.dumps(answer | {"busy": time.process_time() - busy}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transformers-python")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--passive", action="store_true", help="transformers' threads sleep too")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.theirs:
        return theirs()

    from suzuri.cli import let_idle_threads_sleep

    as_given = dict(os.environ)
    let_idle_threads_sleep()

    import numpy as np
    import torch

    from suzuri.model.config import ModelConfig, preset
    from suzuri.model.inkling import PARTS, Inkling
    from suzuri.model.random_weights import initialize
    from suzuri.model.weights import export_weights, load_weights
    from suzuri.processing.vocabulary import FullVocabulary
    from suzuri.training.config import TrainingConfig
    from suzuri.training.trainer import LocalTrainer
    from suzuri.types import AdamParams, Sample

    torch.set_num_threads(THREADS)
    other = None
    if options.transformers_python:
        other = subprocess.Popen(
            [options.transformers_python, str(Path(__file__).resolve()), "--theirs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(os.environ) if options.passive else as_given,
        )

    def ask(words: dict[str, Any]) -> dict[str, float]:
        assert other is not None
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(words) + "\n")
        other.stdin.flush()
        return json.loads(other.stdout.readline())

    def loaded(case: str, folder: Path) -> tuple[Inkling, Path]:
        """The model, and a folder in transformers' layout with the same weights."""
        if case == "base":
            model = Inkling(ModelConfig.from_file(GOLDEN / "original"), dtype=torch.float32)
            load_weights(model, GOLDEN / "original", want=PARTS)
            return model, GOLDEN / "transformers"
        model = Inkling(preset("inkling-nano"), dtype=torch.float32)
        initialize(model, 0)
        export_weights(model, folder / case, layout="transformers", dtype="float32")
        return model, folder / case

    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {THREADS} threads, torch {torch.__version__}",
        "idle_threads": {
            "ours": "sleep, as the command has it",
            "transformers": "sleep" if options.passive else "torch's default",
        },
        "cases": {},
    }
    params = AdamParams(learning_rate=LEARNING_RATE, beta2=0.999, eps=1e-8)
    for case, (count, length) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            model, path = loaded(case, Path(folder))
            rows = model.config.text.unpadded_vocab_size
            trainer = LocalTrainer(
                model, TrainingConfig(token_budget=count * length), FullVocabulary()
            )
            samples = [
                Sample(
                    tokens=ids[:-1],
                    inputs={
                        "target_tokens": np.array(ids[1:]),
                        "weights": np.ones(length, np.float32),
                    },
                )
                for ids in tokens_of(case, rows)
            ]
            if other is not None:
                ask({"case": case, "folder": str(path), "rows": rows})
            mine: list[float] = []
            mine_busy: list[float] = []
            times: list[float] = []
            busy: list[float] = []
            losses: list[tuple[float, float]] = []
            for _ in range(options.turns):
                time.sleep(REST)
                own_losses: list[float] = []
                for number in range(STEPS):
                    start, before = time.perf_counter(), time.process_time()
                    output = trainer.forward_backward(samples, "cross_entropy")
                    trainer.optim_step(params)
                    own_losses.append(output.loss_sum / output.weight_sum)
                    if number:
                        mine.append(time.perf_counter() - start)
                        mine_busy.append(time.process_time() - before)
                if other is None:
                    continue
                time.sleep(REST)
                for number in range(STEPS):
                    answer = ask({})
                    losses.append((own_losses[number], answer["loss"]))
                    if number:
                        times.append(answer["seconds"])
                        busy.append(answer["busy"])
        entry: dict[str, Any] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": count * length,
            "ours_s": [round(x, 4) for x in mine],
            "ours_cpu_s": round(statistics.median(mine_busy), 4),
            "ours_tokens_per_s": round(count * length / statistics.median(mine), 1),
        }
        if times:
            entry["transformers_s"] = [round(x, 4) for x in times]
            entry["transformers_cpu_s"] = round(statistics.median(busy), 4)
            entry["ratio"] = round(statistics.median(times) / statistics.median(mine), 2)
            entry["losses"] = [[round(x, 5) for x in pair] for pair in losses]
            entry["largest_difference_of_losses"] = max(abs(a - b) for a, b in losses)
        result["cases"][case] = entry
    if other is not None:
        assert other.stdin is not None
        other.stdin.close()
        other.wait()
    print(json.dumps(result, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
