"""vLLM on a task of peers.py: `python -m suzuri.tools.bench.adapter_vllm TASK ANSWER`.

Its own dummy weights, offline engine, greedy, prefix cache off; everything else as it comes.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from suzuri.tools.bench.adapter import Answer, cells_of, read_task, time_cell

MEMORY = 0.92
"""Share of the GPU's memory that it may take."""


def main(asked: str, answered: str) -> None:
    """Times every cell and writes the answer after each."""
    task = read_task(asked)
    vllm: Any = importlib.import_module("vllm")
    cells = cells_of(task)
    answer = Answer(path=Path(answered), version=str(vllm.__version__))
    answer.write()
    llm = vllm.LLM(
        model=str(Path(task.config).parent),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=task.seed % 2**31,
        max_model_len=max(cell.length for cell in cells) + task.steps + 2,
        max_num_seqs=max(cell.batch for cell in cells),
        max_num_batched_tokens=max(task.token_budget, *(cell.batch for cell in cells)),
        enable_prefix_caching=False,
        gpu_memory_utilization=MEMORY,
    )

    def generate(prompts: list[list[int]], tokens: int) -> None:
        asked_for = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, asked_for, use_tqdm=False)
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {tokens}:
            raise RuntimeError(f"vLLM gave {sorted(counts)} tokens for {tokens} that were asked")

    for cell in cells:
        answer.put(cell, time_cell(task, cell, generate, wait=lambda: None))


if __name__ == "__main__":
    main(*sys.argv[1:3])
