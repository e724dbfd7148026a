"""Generation on the CPU: ours against transformers on the golden `base` weights, in one run.

    python benchmarks/cpu_generate.py --transformers-python /path/to/python --json OUT

The second interpreter needs torch and transformers 5.23 (and what its Inkling imports: scipy,
torchvision). Both run fp32, greedy, two threads, the same prompts; each case is timed in turns,
three times each, and the medians are compared. `batch16`: 16 prompts of 32 tokens, 64 new ones
each.
`ragged64`: 64 prompts of 32 tokens that want 8 to 256 new tokens each; transformers runs them as
one batch until the longest is done, and only wanted tokens count.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "base"
THREADS = 2
REST = 0.5
"""Seconds between two turns: idle threads of the other process still spin for a while."""


def cases() -> dict[str, tuple[list[list[int]], list[int]]]:
    import random

    generator = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[generator.randrange(290) for _ in range(32)] for _ in range(count)]

    wanted = [generator.randrange(8, 257) for _ in range(64)]
    wanted[0] = 256
    return {"batch16": (prompts(16), [64] * 16), "ragged64": (prompts(64), wanted)}


def theirs() -> None:
    """Runs in the other interpreter: one line of JSON per line of stdin, which names a case."""
    import torch
    from transformers.models.inkling import modeling_inkling

    torch.set_num_threads(THREADS)
    kind: Any = modeling_inkling.InklingForConditionalGeneration
    model = kind.from_pretrained(str(GOLDEN / "transformers"), dtype=torch.float32).eval()
    known = cases()
    for line in sys.stdin:
        prompts, wanted = known[line.strip()]
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max(wanted),
                min_new_tokens=max(wanted),
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        rows = out[:, ids.shape[1] :].tolist()
        tokens = [row[:count] for row, count in zip(rows, wanted, strict=True)]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transformers-python")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.theirs:
        return theirs()

    import torch

    from suzuri import LLM, SamplingParams

    torch.set_num_threads(THREADS)
    llm = LLM(
        str(GOLDEN / "original"),
        dtype="float32",
        max_running=64,
        max_context=512,
        prefix_cache=False,
        memory_gb=4,
    )

    def ours(case: str) -> tuple[float, list[list[int]]]:
        prompts, wanted = cases()[case]
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in wanted
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.perf_counter()
        outputs = llm.generate(requests, params, show_progress=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    other = None
    if options.transformers_python:
        other = subprocess.Popen(
            [options.transformers_python, str(Path(__file__).resolve()), "--theirs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {THREADS} threads, torch {torch.__version__}",
        "cases": {},
    }
    for case, (_, wanted) in cases().items():
        mine: list[float] = []
        other_times: list[float] = []
        equal = None
        ours(case)
        for _ in range(options.repeats):
            time.sleep(REST)
            seconds, tokens = ours(case)
            time.sleep(REST)
            mine.append(seconds)
            if other is not None:
                assert other.stdin is not None and other.stdout is not None
                other.stdin.write(case + "\n")
                other.stdin.flush()
                answer = json.loads(other.stdout.readline())
                other_times.append(answer["seconds"])
                equal = sum(a == b for a, b in zip(tokens, answer["tokens"], strict=True))
        total = sum(wanted)
        entry: dict[str, Any] = {
            "tokens": total,
            "ours_s": round(statistics.median(mine), 3),
            "ours_tokens_per_s": round(total / statistics.median(mine), 1),
        }
        if other_times:
            entry["transformers_s"] = round(statistics.median(other_times), 3)
            entry["transformers_tokens_per_s"] = round(total / statistics.median(other_times), 1)
            entry["ratio"] = round(statistics.median(other_times) / statistics.median(mine), 2)
            entry["equal_outputs"] = f"{equal} of {len(wanted)}"
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
