"""The engine's numbers are those of one forward over the whole sequence, bit for bit.

Serving.compare holds every hidden row, all logits, every drawn id and every log-prob against it;
the whole matrix is `suzuri verify` (tests/tools/test_verify.py).
"""

import functools

import pytest
import torch

from suzuri.model.inkling import Inkling
from suzuri.tools.verify import checks_hits as hits
from suzuri.tools.verify import checks_load as load
from suzuri.tools.verify import checks_plain as plain
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab
from suzuri.tools.verify.reference import Reference
from tests.model.models import CASES, golden_model, random_model

DTYPES = ("float32", "bfloat16")


@functools.cache
def tiny(dtype: str) -> Inkling:
    return random_model("tiny", getattr(torch, dtype)).requires_grad_(False)


def lab_of(model: Inkling, dtype: str, **settings: int) -> Lab:
    config = VerifyConfig(model="", dtype=dtype, **settings)  # pyright: ignore[reportArgumentType]
    return Lab(model, config, Reference(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_every_size_give_the_same_rows(dtype: str) -> None:
    """c01: the second chunk sees the conv inputs and the window of the first."""
    lab = lab_of(tiny(dtype), dtype)
    digests: set[tuple[int, ...]] = set()
    for size in (1, 2, 3, 4, 5, 7, 23):
        serving = lab.serving(page=4, context=30, max_chunk=size)
        request = serving.serve(lab.ids(23), max_tokens=4)
        serving.compare()
        rows = serving.recorder.rows[request.sequences[0]]
        assert sorted(row.position for row in rows) == list(range(26))
        assert max(max(counts) for counts in serving.recorder.counts) == size
        digests.add(tuple(row.hidden for row in rows))
    assert len(digests) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_tails_behind_one_prefix(cached: bool) -> None:
    """c03: a hit restores keys, values and conv inputs together; each tail as without a hit."""
    lab = lab_of(tiny("float32"), "float32")
    prefix = lab.ids(40)
    serving = lab.serving(page=16, context=80, prefix_cache=cached)
    serving.serve(prefix, max_tokens=2)
    for i in range(3):
        serving.serve(prefix + hits.tail(lab, serving.requests[0].sequences[0].tokens[40], 9, i))
    serving.compare()
    found = [request.sequences[0].num_cached for request in serving.requests]
    assert found == ([0, 40, 40, 40] if cached else [0, 0, 0, 0])


@pytest.mark.parametrize("kind", ["global", "local", "snapshot"])
def test_a_point_that_lost_a_kind_of_state_is_a_miss(kind: str) -> None:
    """c04: never a hit with one kind of state gone; the answer is the same either way."""
    lab = lab_of(tiny("float32"), "float32")
    prompt = lab.ids(40)
    serving = lab.serving(page=4, context=64)
    first = serving.serve(prompt, max_tokens=10)
    pool = serving.engine.scheduler.pools[kind]
    assert serving.engine.cache.make_room(kind, pool.size - 1)
    serving.engine.check()
    again = serving.serve(prompt, max_tokens=10)
    serving.expect_cached(again, 0)
    serving.compare()
    assert again.sequences[0].tokens == first.sequences[0].tokens
    third = serving.serve(prompt, max_tokens=10)
    serving.expect_cached(third, 39)
    serving.compare()


@pytest.mark.parametrize("cached", [True, False])
def test_preempted_sequences_give_what_they_give_alone(cached: bool) -> None:
    """c06: four sequences of 60 tokens in a pool that cannot hold them."""
    lab = lab_of(tiny("float32"), "float32")
    prompts = [lab.ids(36, i) for i in range(4)]
    alone: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        serving = lab.serving(page=4, context=64)
        alone.append(serving.serve(prompt, max_tokens=24, seed=i).sequences[0].tokens)
        serving.compare()
    pools = lab.tight(4, 64, spare=20, windows=4)
    together = lab.serving(page=4, context=64, max_running=4, prefix_cache=cached, **pools)
    for i, prompt in enumerate(prompts):
        together.add(prompt, max_tokens=24, seed=i)
    together.run()
    together.compare()
    assert together.counters.preemptions > 0
    assert together.counters.admissions > 4
    assert [request.sequences[0].tokens for request in together.requests] == alone


def test_local_pages_stop_growing_behind_the_window() -> None:
    """c18: of a long sequence the local layers keep a window and a chunk, prefilled or decoded."""
    lab = lab_of(tiny("float32"), "float32")
    page, chunk = 4, 32
    serving = lab.serving(page=page, context=700, max_chunk=chunk, prefix_cache=False)
    serving.add(lab.ids(600), max_tokens=90)
    most: dict[bool, int] = {True: 0, False: 0}
    while serving.engine.has_work:
        serving.step()
        is_decoding = bool(serving.recorder.counts) and serving.recorder.counts[-1] == [1]
        used = serving.engine.scheduler.pools["local"].used
        most[is_decoding] = max(most[is_decoding], used)
    assert 0 < most[False] <= (lab.window + chunk) // page + 2
    assert 0 < most[True] <= lab.window // page + 2
    serving.compare()


def test_a_batch_of_one_step_holds_prefills_decodes_and_a_resumed_sequence() -> None:
    """What stands beside a sequence in a step does not matter, whatever it is doing."""
    lab = lab_of(tiny("bfloat16"), "bfloat16")
    serving = lab.serving(page=4, context=80, token_budget=16, max_chunk=8)
    serving.serve(lab.ids(30), max_tokens=2)
    serving.add(lab.ids(5, 1), max_tokens=30)
    serving.step()
    serving.step()
    serving.add(lab.ids(50, 2), max_tokens=3)
    serving.step()
    resumed = serving.add([*lab.ids(30), *lab.ids(20, 3)], max_tokens=3)
    serving.run()
    serving.compare()
    assert resumed.sequences[0].num_cached >= 29
    assert any(len(counts) == 3 and sorted(counts)[1] > 1 for counts in serving.recorder.counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_are_served_exactly(case: str, dtype: str) -> None:
    """No local layers, no experts, windows beyond the prompt, two to five taps."""
    lab = lab_of(golden_model(case, getattr(torch, dtype)), dtype, tokens=24)
    plain.ragged(lab, 4)
    hits.prefix_hit(lab, 4)
    hits.identical(lab, 4)
    hits.stopped_turn(lab, 4)
    load.preemption(lab, 4)
    assert lab.rows > 500
