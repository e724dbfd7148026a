"""Whether the walk before the first request finds every kernel that serving launches then.

Real engines under random mixed loads on a pretended GPU, their launches seen in the same way. In
the interpreter they run; without it nothing does, but kernels are told apart as Triton does it:
`python -m tests.engine.rehearsed SEED ...` prints those that the walk has missed.
"""

import contextlib
import random
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.launches import unlaunched
from suzuri.engine.rehearsal import walk
from suzuri.engine.sampling_params import SamplingParams
from suzuri.kernels.matmul import buckets
from suzuri.processing.vocabulary import FullVocabulary
from tests.engine.apart import pretend_target
from tests.kernels.pretend_gpu import pretended_gpu
from tests.model.models import random_model

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.8},
    {"min_p": 0.1, "temperature": 0.8},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.3, "temperature": 1.0, "logprobs": 3},
    {"logprobs": 0},
    {"sampled_logprobs": True, "temperature": 0.6},
    {"logit_bias": {5: 1.0}},
    {"prompt_logprobs": 2},
    {"min_tokens": 3, "stop_token_ids": [4]},
)


SMALL: dict[str, Any] = {"max_context": 48, "max_running": 3, "token_budget": 24}
"""Limits of a short walk."""


@contextlib.contextmanager
def gpu_engine(dtype: torch.dtype, **fields: Any) -> Generator[Engine]:
    """An engine of the tiny model that takes itself to be on a GPU. Steps are not recorded."""
    patch = pytest.MonkeyPatch()
    model = random_model("tiny", dtype).requires_grad_(False)
    options: dict[str, Any] = {"max_context": 400, "max_running": 20, "page_size": 16}
    options |= {"token_budget": 200, "cuda_graphs": False}
    pools: dict[str, Any] = {"global_pages": 900, "local_pages": 900, "snapshots": 40}
    name: Any = str(dtype).removeprefix("torch.")
    try:
        with pretended_gpu(patch):
            config = EngineConfig(dtype=name, **(options | pools | fields))
            yield Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())
    finally:
        patch.undo()


def load(engine: Engine, seed: int, requests: int, *, longest: int = 300, tokens: int = 20) -> None:
    """Ragged requests that come while others run, some with a shared beginning."""
    chance = random.Random(seed)
    shared = [chance.randrange(100, 400) for _ in range(longest)]
    for i in range(requests):
        length = min(chance.choice([1, 2, 15, 16, 17, 40, 64, 65, 128, 250, 300]), longest)
        prompt = [chance.randrange(100, 400) for _ in range(length)]
        if chance.random() < 0.4:
            begun = chance.randrange(length)
            prompt[:begun] = shared[:begun]
        wanted = SamplingParams(
            max_tokens=chance.randrange(3, tokens),
            seed=i,
            n=chance.choice([1, 1, 1, 3]),
            ignore_eos=True,
            detokenize=False,
            **chance.choice(KINDS),
        )
        engine.add(str(i), prompt, wanted)
        for _ in range(chance.choice([0, 0, 1, 4])):
            engine.step()
    engine.run()


def missed(seed: int, **fields: Any) -> list[str]:
    """What a load of this seed launches and the walk has not seen, as Triton tells it apart."""
    pretend_target()
    with gpu_engine(torch.bfloat16, **fields) as engine:
        walked, _ = walk(engine.runner, engine.vocabulary)
        with unlaunched() as found, buckets.untested([]):
            load(engine, seed, 40)
    assert not walked.problems, walked.problems
    assert len(found.kernels) > 20, "the load launches nothing"
    return [f"{k.module}.{k.name} {k.data}" for k in found.kernels if k not in walked.kernels]


if __name__ == "__main__":
    for word in sys.argv[1:]:
        for line in missed(int(word)):
            print(line)
