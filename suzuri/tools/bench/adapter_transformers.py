"""transformers on a task of peers.py: `python -m suzuri.tools.bench.adapter_transformers TASK
ANSWER`.

The model's own class with random weights, its default attention (sdpa) and cache; prompts in one
pass.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suzuri.model.random_weights import STD
from suzuri.tools.bench.adapter import Answer, cells_of, read_task, time_cell
from suzuri.tools.bench.watch import synchronise
from suzuri.tools.bench.weights import fill_normal

MOST_LENGTH, MOST_TOKENS = 8192, 65_536
"""Of one cell: it runs prompts in one pass, with a bias for every pair of tokens in memory."""


def main(asked: str, answered: str) -> None:
    """Times every cell that it can hold, and writes the answer after each."""
    task = read_task(asked)
    transformers: Any = importlib.import_module("transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answer = Answer(path=Path(answered), version=str(transformers.__version__))
    answer.write()
    released = json.loads(Path(task.config).read_text("utf-8"))
    config = transformers.InklingConfig.from_dict(released).get_text_config()
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.InklingForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    draw(model, task.seed)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids: Tensor = torch.tensor(prompts, device=device)
        cache: Any = None
        for _ in range(tokens):
            out: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)

    for cell in cells_of(task):
        if cell.length > MOST_LENGTH or cell.batch * cell.length > MOST_TOKENS:
            answer.skip(cell, f"more than {MOST_LENGTH} or, in all, {MOST_TOKENS} tokens")
            continue
        try:
            answer.put(cell, time_cell(task, cell, generate, wait=lambda: synchronise(device)))
        except torch.OutOfMemoryError:
            answer.skip(cell, "out of memory")
            torch.cuda.empty_cache()


def draw(model: nn.Module, seed: int) -> None:
    """Matrices normal, vectors 1, selection bias 0, as weights.py does for ours."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                fill_normal(tensor, generator, STD)
            else:
                tensor.fill_(0.0 if "bias" in name else 1.0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
