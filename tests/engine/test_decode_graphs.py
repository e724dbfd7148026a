"""Recorded decode steps: the same bits as steps that are not, whatever rows and pages are padding.

On a CPU a recorder that runs the step again stands for the graph: sizes, padding and page slots are
tested here, the capture on a GPU.
"""

import gc
import itertools
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.engine.config import EngineConfig
from suzuri.engine.decode_graphs import (
    DecodeGraphs,
    Forward,
    Recorded,
    decode_fields,
    has_single_rows,
)
from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.sizes_workspace import decode_buckets, max_graphs
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab
from suzuri.tools.verify.reference import Reference
from tests.model.models import random_model

HAS_GPU = torch.cuda.is_available()


class Again:
    """Records by running once more, and counts."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.replayed = 0

    def __call__(self, forward: Forward, fields_3N: Tensor, blocks: int) -> Recorded:
        assert not fields_3N.any(), "recording must not touch what a sequence has"
        ids_N, hidden_ND = (x.clone() for x in forward(fields_3N, blocks))
        self.recorded.append((fields_3N.shape[1], blocks))
        method = weakref.WeakMethod(forward)  # a graph does not hold what it recorded either

        def replay() -> None:
            self.replayed += 1
            again = method()
            assert again is not None
            found = again(fields_3N, blocks)
            for target, value in zip((ids_N, hidden_ND), found, strict=True):
                target.copy_(value)

        return Recorded(fields_3N=fields_3N, token_ids_N=ids_N, hidden_ND=hidden_ND, replay=replay)


def engine_of(dtype: str, device: str = "cpu", **fields: Any) -> Engine:
    model = random_model("tiny", getattr(torch, dtype)).requires_grad_(False).to(device)
    options: dict[str, Any] = {"max_context": 200, "max_running": 12, "page_size": 4}
    pools: dict[str, Any] = {"global_pages": 800, "local_pages": 400, "snapshots": 40}
    config = EngineConfig(dtype=dtype, **(options | pools | fields))  # pyright: ignore[reportArgumentType]
    return Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())


def replayed_by(engine: Engine, recorder: Any, most: int = 100) -> None:
    runner = engine.runner
    runner.graphs = DecodeGraphs(
        recorder,
        sizes=(1, 2, 3, 8, 12),
        max_blocks=engine.capacity.table_columns(engine.config.page_size),
        most=most,
        device=runner.device,
    )


def outputs(engine: Engine, requests: int = 14) -> dict[str, Any]:
    """Tokens and log-probs of ragged requests that come while others run."""
    chance = random.Random(3)
    found: dict[str, Any] = {}
    for i in range(requests):
        prompt = [chance.randrange(100, 400) for _ in range(chance.randrange(1, 90))]
        wanted = SamplingParams(
            max_tokens=chance.randrange(1, 40),
            temperature=chance.choice([0.0, 1.0]),
            seed=i,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
        )
        engine.add(str(i), prompt, wanted)
        for _ in range(chance.randrange(4)):
            collect(engine, found)
    while engine.has_work:
        collect(engine, found)
    engine.check()
    return found


def collect(engine: Engine, found: dict[str, Any]) -> None:
    for event in engine.step():
        found.setdefault(event.sequence.request.id, []).append((event.token, event.logprobs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tight", [False, True])
def test_a_replayed_step_gives_the_same_tokens_and_logprobs(dtype: str, tight: bool) -> None:
    pools: dict[str, Any] = {"global_pages": 70, "local_pages": 60, "snapshots": 4} if tight else {}
    recorder = Again()
    plain, subject = engine_of(dtype, **pools), engine_of(dtype, **pools)
    replayed_by(subject, recorder)
    assert outputs(subject) == outputs(plain)
    assert recorder.replayed > 30
    assert len({rows for rows, _ in recorder.recorded}) >= 3
    assert len({blocks for _, blocks in recorder.recorded}) >= 2
    assert subject.scheduler.counters == plain.scheduler.counters


def test_padding_writes_where_nothing_is() -> None:
    engine = engine_of("float32")
    runner = engine.runner
    for layer in runner.cache.layers:
        for ring in (layer.kv_conv_LRC, layer.attn_conv_LRC, layer.mlp_conv_LRC):
            ring.fill_(0.5)
        layer.k_pages_PTUC.fill_(0.5)
        layer.v_pages_PTUC.fill_(0.5)
    fields_3N = torch.from_numpy(decode_fields([], 3))
    with torch.no_grad():
        _, hidden_ND = runner.decode_rows(fields_3N, 16)
    assert hidden_ND.isfinite().all()
    for layer in runner.cache.layers:
        for ring in (layer.kv_conv_LRC, layer.attn_conv_LRC, layer.mlp_conv_LRC):
            assert (ring[1:] == 0.5).all()
        assert (layer.k_pages_PTUC[1:] == 0.5).all()
        assert (layer.v_pages_PTUC[1:] == 0.5).all()


def test_rows_do_not_see_what_padding_stands_beside_them() -> None:
    engine = engine_of("bfloat16")
    runner = engine.runner
    runner.cache.layers[0].kv_conv_LRC.normal_()
    for slot, page in ((3, 1), (5, 2)):
        for table in runner._tables[:2]:
            table[slot, 0] = page
    few = torch.tensor([[7, 9], [0, 0], [3, 5]])
    many = torch.cat([few, torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0]])], 1)
    with torch.no_grad():
        _, few_ND = runner.decode_rows(few, 1)
        _, many_ND = runner.decode_rows(many, 32)
    assert torch.equal(few_ND, many_ND[:2])


def test_the_last_used_sizes_are_kept() -> None:
    engine, recorder = engine_of("float32"), Again()
    replayed_by(engine, recorder, most=2)
    graphs = engine.runner.graphs
    assert graphs is not None
    plain = engine_of("float32")
    for _ in range(2):
        assert outputs(engine) == outputs(plain)
        assert len(graphs) == 2
    assert len(recorder.recorded) > len(set(recorder.recorded)), "a dropped one came back"


def test_sizes_and_widths() -> None:
    graphs = DecodeGraphs(
        _never, sizes=(1, 2, 8), max_blocks=50, most=1, device=torch.device("cpu")
    )
    assert graphs.key(1, 1) == (1, 16)
    assert graphs.key(3, 16) == (8, 16)
    assert graphs.key(8, 17) == (8, 32)
    assert graphs.key(8, 33) == (8, 50), "no wider than the tables are"
    assert graphs.key(9, 1) is None


def test_every_batch_has_a_size_with_little_padding() -> None:
    for most in (1, 5, 8, 12, 64, 100, 512, 3000):
        sizes = decode_buckets(most)
        assert sizes[-1] == min(most, 512)
        assert sorted(set(sizes)) == list(sizes)
        assert sizes[: min(most, 8)] == tuple(range(1, min(most, 8) + 1))
        assert all(b - a <= 8 for a, b in itertools.pairwise(sizes))
        assert max_graphs(most) == len(sizes) + 32


def test_chunks_of_one_are_replayed_and_longer_ones_not() -> None:
    prompt = list(range(100, 124))
    wanted = SamplingParams(
        max_tokens=4, temperature=0.0, prompt_logprobs=2, ignore_eos=True, detokenize=False
    )
    found: list[Any] = []
    for chunk, replayed in ((1, 24 + 3 - 1), (5, 3 - 1), (None, 3 - 1)):
        engine, recorder = engine_of("float32", max_chunk=chunk), Again()
        replayed_by(engine, recorder)
        request = engine.add("a", prompt, wanted)
        events = engine.run()
        assert recorder.replayed == replayed
        found.append(([event.token for event in events], request.prompt_logprobs))
    assert found[0] == found[1] == found[2]


def test_a_media_token_alone_is_not_replayed() -> None:
    engine = engine_of("float32")
    engine.add("a", [5], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    works = engine.scheduler.schedule().works
    assert has_single_rows(works)
    works[0].sequence.request.media = (object(),)  # pyright: ignore[reportAttributeAccessIssue]
    assert not has_single_rows(works)
    works[0].start = 1
    assert has_single_rows(works)


def _never(*_: Any) -> Any:
    raise AssertionError


def test_an_engine_gives_its_memory_back_at_once() -> None:
    """Nothing in it may hold it in a circle: its pools would stay until a collection."""
    engine = engine_of("float32")
    replayed_by(engine, Again())
    outputs(engine, requests=3)
    seen = [weakref.ref(engine), weakref.ref(engine.runner), weakref.ref(engine.runner.cache)]
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()


def test_a_watched_engine_gives_its_memory_back_at_once() -> None:
    lab = Lab(
        random_model("tiny", torch.float32).requires_grad_(False),
        VerifyConfig(model="", dtype="float32"),
        Reference(random_model("tiny", torch.float32)),
    )
    serving = lab.serving(page=4, context=60)
    serving.serve(lab.ids(20), max_tokens=3)
    seen = weakref.ref(serving.engine.runner.cache)
    gc.collect()
    gc.disable()
    try:
        del serving
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_on_a_gpu(dtype: str) -> None:
    subject, plain = (engine_of(dtype, "cuda", cuda_graphs=on) for on in (True, False))
    assert plain.runner.graphs is None
    assert subject.runner.graphs is not None
    for _ in range(2):
        assert outputs(subject) == outputs(plain)
    assert len(subject.runner.graphs) > 5


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_dropped_graphs_on_a_gpu() -> None:
    subject, plain = engine_of("bfloat16", "cuda"), engine_of("bfloat16", "cuda", cuda_graphs=False)
    graphs = subject.runner.graphs
    assert graphs is not None
    graphs._most = 2
    assert outputs(subject) == outputs(plain)
    assert len(graphs) == 2
