"""How fast weights come from the trainer to a sampler in the same process, against memory.

A publication reads all weights to hash them, while answers are still drawn; then drawing pauses,
the weights are copied, and what arrived is read and hashed. Memory bandwidth is that of a plain
copy of the same tensors, by torch or by numpy, whichever is faster (what it reads and writes),
measured in turn with the publications. `share` is how near a publication and its pause come. Of
each the least time counts: other programs on the machine only add to it.

    python benchmarks/rl_publication.py "2-core x86-64 CPU" benchmarks/results/rl-publication.json
"""

import asyncio
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig
from suzuri.model.content_hash import content_hash
from suzuri.model.inkling import Inkling
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.rl.local_sampler import LocalSampler

WIDTH, EXPERTS = 1024, 56
REPEATS = 25
Bytes = npt.NDArray[np.uint8]
COPY, PAUSE, ALL = 2, 3, 4
"""Times that every byte is read or written."""


def shape() -> ModelConfig:
    """`tiny` made wide: 1 GB, most of it in routed experts."""
    tiny = PRESETS["tiny"]
    text = dataclasses.replace(
        tiny.text,
        hidden_size=WIDTH,
        intermediate_size=WIDTH // 2,
        dense_intermediate_size=2 * WIDTH,
        n_routed_experts=EXPERTS,
    )
    return dataclasses.replace(tiny, text=text, vision=None, audio=None, mtp=MtpConfig())


def model(device: str) -> Inkling:
    found = Inkling(shape(), dtype=torch.bfloat16, device=device).requires_grad_(False)
    for parameter in found.parameters():
        parameter.normal_()
    return found


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(action: Callable[[], object], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - start


def _copied(pairs: list[tuple[Bytes, Bytes]]) -> None:
    for to, given in pairs:
        np.copyto(to, given)


def main(machine: str, out: str, device: str) -> None:
    load = os.getloadavg()[0]
    trained, served = model(device), model(device)
    vocabulary = vocabulary_of(served.config.kept_vocabulary, Tokenizer().token_bytes)
    config = EngineConfig(
        max_context=64, max_running=1, global_pages=16, local_pages=16, snapshots=4, page_size=16
    )
    sampler = LocalSampler(Engine(served, config, memory_bytes=2**62, vocabulary=vocabulary))
    weights = dict(served.named_parameters())
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    pairs = [(weights[name].detach(), x.detach()) for name, x in trained.named_parameters()]
    found: dict[str, list[float]] = {"copy": [], "hash": [], "pause": [], "publication": []}
    for repeat in range(REPEATS + 1):
        trained.decoder.norm.weight.add_(1)
        copy = timed(lambda: [to.copy_(x) for to, x in pairs], device)
        if device == "cpu":
            plain = [
                (to.flatten().view(torch.uint8).numpy(), x.flatten().view(torch.uint8).numpy())
                for to, x in pairs
            ]
            copy = min(copy, timed(partial(_copied, plain), device))
        publication = timed(lambda: asyncio.run(sampler.publish(trained)), device)
        parts = sampler.publication
        if repeat:  # the first one touches memory, compiles and starts threads
            found["copy"].append(copy)
            found["publication"].append(publication)
            found["hash"].append(parts["hash_seconds"])
            found["pause"].append(parts["pause_seconds"])
    assert content_hash(weights.items()) == content_hash(
        (name, tensor) for name, tensor in trained.named_parameters() if name in weights
    )
    seconds = {name: min(values) for name, values in found.items()}
    bandwidth = COPY * size / seconds["copy"]
    busy = seconds["hash"] + seconds["pause"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(command, check=True, capture_output=True, text=True)
    result = {
        "what": "publication of weights to a sampler in the same process",
        "bytes": size,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "memory_gb_per_second": round(bandwidth / 1e9, 2),
        "weights_gb_per_second": round(size / busy / 1e9, 2),
        "weights_gb_per_second_of_pause": round(size / seconds["pause"] / 1e9, 2),
        "share_of_memory_bandwidth": round(ALL * size / busy / bandwidth, 3),
        "share_of_memory_bandwidth_in_pause": round(PAUSE * size / seconds["pause"] / bandwidth, 3),
        "machine": machine,
        "threads": torch.get_num_threads(),
        "load_average_before": round(load, 1),
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": head.stdout.strip(),
        "command": "python benchmarks/rl_publication.py MACHINE OUT [DEVICE]",
        "torch": torch.__version__,
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "cpu")
