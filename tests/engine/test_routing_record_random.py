"""Records under random workloads: an engine over tokens whose rows say what a model would read."""

import dataclasses
import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.engine.engine import Engine
from suzuri.engine.plan import Plan
from suzuri.engine.routing import Routing
from suzuri.engine.runner import Launched
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.transfers import Download
from tests.engine import simulated


class RoutingRunner(simulated.TokenRunner):
    """Each row goes to "experts" that are a hash of all that it reads."""

    rows: list[bytes]

    def execute(self, plan: Plan) -> Launched:
        self.rows = []
        launched = super().execute(plan)
        rows = iter(self.rows)
        found: list[bytes] = []
        for work in plan.works:
            own = [next(rows) for _ in range(work.count)]
            found += own if work.sequence.routing is not None else []
        routing = _download(found) if found else None
        return dataclasses.replace(launched, plan=plan, routing=routing)

    def _read(self, tables: dict[str, list[int]], slot: int, position: int) -> bytes:
        own = super()._read(tables, slot, position)
        token = self.pages["global"][tables["global"][position // self.size], position % self.size]
        self.rows.append(hashlib.shake_128(own + repr(token).encode()).digest(NUM_BYTES))
        return own


def _download(rows: list[bytes]) -> Download:
    bytes_NX = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), NUM_BYTES)
    layers, chosen, slots = SHAPE
    experts_NLK = bytes_NX[:, : layers * chosen].reshape(-1, layers, chosen)
    weights_NLJ = bytes_NX[:, -layers * slots :].reshape(-1, layers, slots).astype(np.float32)
    return Download([torch.from_numpy(experts_NLK.copy()), torch.from_numpy(weights_NLJ)])


def _shape() -> tuple[int, int, int]:
    text = simulated.config().text
    chosen = text.num_experts_per_tok
    return text.num_moe_layers, chosen, chosen + text.n_shared_experts


SHAPE = _shape()
NUM_BYTES = SHAPE[0] * (SHAPE[1] + SHAPE[2])


def engine(**fields: Any) -> Engine:
    found = simulated.engine(**fields)
    text = simulated.config().text
    runner: Any = RoutingRunner(
        found.capacity, found.config, text.sliding_window_size or 0, text.sconv_kernel_size
    )
    found.runner = runner
    return found


def alone(tokens: list[int]) -> Routing:
    """What an engine that does nothing else records of these tokens."""
    subject = engine(prefix_cache=False)
    request = subject.add("x", tokens, SamplingParams(max_tokens=1, seed=0, routing=True))
    subject.run()
    found = request.sequences[0].routed
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", [True, False])
def test_records_are_those_of_an_engine_that_does_nothing_else(seed: int, overlap: bool) -> None:
    chance = random.Random(seed)
    pools = {"global_pages": 40, "local_pages": 30, "snapshots": chance.choice([4, 12])}
    subject = engine(max_context=120, overlap=overlap, resume_stride=chance.choice([0, 8]), **pools)
    families = [[chance.randrange(200) for _ in range(40)] for _ in range(3)]
    requests: list[Any] = []
    for number in range(60):
        family = chance.choice(families)
        prompt = family[: chance.randrange(1, 40)]
        prompt += [chance.randrange(200) for _ in range(chance.randrange(4))]
        if requests and chance.random() < 0.3:  # goes on from an answer
            prompt = chance.choice(requests).sequences[0].tokens[:70] + prompt[:5]
        params = SamplingParams(
            max_tokens=chance.randrange(1, 20),
            seed=number,
            n=chance.choice([1, 1, 3]),
            routing=chance.random() < 0.6,
        )
        requests.append(subject.add(str(number), prompt, params, priority=chance.randrange(2)))
        for _ in range(chance.randrange(6)):
            subject.step()
            subject.check()
        if chance.random() < 0.1:
            subject.abort(str(chance.randrange(number + 1)))
    while subject.has_work:
        subject.step()
        subject.check()
    counters = subject.scheduler.counters
    assert counters.preemptions > 0 and counters.cached_tokens > 100
    records = [one for request in requests for one in request.sequences if one.routed is not None]
    assert len(records) > 20
    assert sum(one.num_cached > 0 for one in records) > 5
    for sequence in records:
        expected = alone(sequence.tokens)
        count = len(sequence.tokens) - 1
        if sequence.finish == "abort":
            count = min(count, len(sequence.routed.experts_TLK))
        for mine, theirs in zip(sequence.routed, expected, strict=True):
            assert len(mine) == count
            assert np.array_equal(mine, theirs[:count])
