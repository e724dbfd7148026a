"""Recorded steps: the same bits as steps that are not, whatever rows and pages are padding.

On a CPU a recorder that runs the step again stands for the graph: sizes, padding and page slots are
tested here, the capture on a GPU.
"""

import collections
import gc
import itertools
import logging
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.plan import Work
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.step_batches import Size, is_text, step_batch, step_fields
from suzuri.engine.step_graphs import CudaRecorder, Forward, Recorded, Sizes
from suzuri.model.inkling import Inkling
from suzuri.model.sizes_workspace import (
    decode_buckets,
    max_graphs,
    row_buckets,
    sequence_buckets,
)
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab
from suzuri.tools.verify.reference import Reference
from tests.engine.recorded import MOST_ROWS, Again, replayed_by
from tests.model.models import golden_model, random_model

HAS_GPU = torch.cuda.is_available()


def engine_of(
    dtype: str, device: str = "cpu", model: Inkling | None = None, **fields: Any
) -> Engine:
    if model is None:
        model = random_model("tiny", getattr(torch, dtype)).requires_grad_(False).to(device)
    options: dict[str, Any] = {"max_context": 200, "max_running": 12, "page_size": 4}
    pools: dict[str, Any] = {"global_pages": 800, "local_pages": 400, "snapshots": 40}
    config = EngineConfig(dtype=dtype, **(options | pools | fields))  # pyright: ignore[reportArgumentType]
    return Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())


def outputs(engine: Engine, requests: int = 14) -> dict[str, Any]:
    """Tokens and log-probs of ragged requests that come while others run."""
    chance = random.Random(3)
    found: dict[str, Any] = {}
    for i in range(requests):
        prompt = [chance.randrange(100, 300) for _ in range(chance.randrange(1, 90))]
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
    pools["token_budget"] = 30
    plain, subject = engine_of(dtype, **pools), engine_of(dtype, **pools)
    replayed_by(subject, recorder)
    for _ in range(2):
        assert outputs(subject) == outputs(plain)
    replayed = collections.Counter(size.is_decode for size in recorder.replayed)
    assert replayed[True] > 30
    assert replayed[False] > 8
    for is_decode in (True, False):
        sizes = [size for size in recorder.recorded if size.is_decode is is_decode]
        assert len({size.rows for size in sizes}) >= 2
    assert len({size.blocks for size in recorder.recorded}) >= 2
    assert len({size.sequences for size in recorder.recorded}) >= 3
    assert subject.scheduler.counters == plain.scheduler.counters


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, None])
def test_chunks_wherever_they_end(chunk: int | None) -> None:
    plain, subject = engine_of("bfloat16"), engine_of("bfloat16", max_chunk=chunk)
    replayed_by(subject, Again())
    assert outputs(subject) == outputs(plain)


def test_recorded_steps_without_overlap() -> None:
    plain, subject = engine_of("bfloat16"), engine_of("bfloat16", overlap=False)
    replayed_by(subject, Again())
    assert outputs(subject) == outputs(plain)


SIZES = [Size(3, 0, 16), Size(16, 1, 16), Size(24, 2, 16), Size(48, 5, 16)]


@pytest.mark.parametrize("size", SIZES)
def test_padding_writes_where_nothing_is(size: Size) -> None:
    engine = engine_of("float32")
    runner = engine.runner
    for layer in runner.cache.layers:
        for ring in (layer.kv_conv_LRC, layer.attn_conv_LRC, layer.mlp_conv_LRC):
            ring.fill_(0.5)
        layer.k_pages_PTUC.fill_(0.5)
        layer.v_pages_PTUC.fill_(0.5)
    fields = torch.from_numpy(step_fields([], size))
    with torch.no_grad():
        _, hidden_ND = runner.step_rows(fields, size)
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

    def rows(fields_3N: Tensor, size: Size) -> Tensor:
        fields = torch.zeros(size.num_fields, dtype=torch.int64)
        fields[: fields_3N.numel()] = fields_3N.reshape(-1)
        fields[size.count_at] = 2
        with torch.no_grad():
            return runner.step_rows(fields, size)[1]

    few_ND, many_ND = rows(few, Size(2, 0, 1)), rows(many, Size(5, 0, 32))
    assert torch.equal(few_ND, many_ND[:2])


def works_of(engine: Engine) -> list[Work]:
    """A chunk of 20 tokens and one of 7, admitted and planned."""
    for count in (20, 7):
        prompt = list(range(100, 100 + count))
        wanted = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        engine.add(str(count), prompt, wanted)
    plan = engine.scheduler.schedule()
    engine.runner._write_tables(plan)
    return plan.works


def test_packed_rows_do_not_see_padding() -> None:
    exact, *padded = (Size(27, 2, 5), Size(48, 3, 16), Size(MOST_ROWS, 5, 32))
    rows: list[Tensor] = []
    for size in (exact, *padded):
        engine = engine_of("bfloat16")
        fields = torch.from_numpy(step_fields(works_of(engine), size))
        with torch.no_grad():
            rows.append(engine.runner.step_rows(fields, size)[1])
        assert rows[-1].shape[0] == size.rows
        assert torch.equal(rows[-1][:27], rows[0])
        assert rows[-1].isfinite().all()


def test_padding_is_shared_by_the_sequences_that_are_left() -> None:
    engine = engine_of("float32")
    works, size = works_of(engine), Size(48, 5, 16)
    fields = torch.from_numpy(step_fields(works, size))
    layers = tuple(engine.runner.cache.layers)
    batch = step_batch(fields, size, 4, engine.runner._tables, layers)
    assert batch.seq_starts_S1.tolist() == [0, 20, 27, 34, 41, 48]
    assert batch.seq_ids_N.tolist() == [0] * 20 + [1] * 7 + [2] * 7 + [3] * 7 + [4] * 7
    assert batch.positions_N.tolist() == [*range(20), *range(7), *range(7), *range(7), *range(7)]
    assert batch.first_positions_S.tolist() == [0] * 5
    cache = batch.cache
    assert cache is not None
    assert cache.conv_slots_S.tolist() == [works[0].slot, works[1].slot, 0, 0, 0]
    assert (cache.global_slots_N[:27] >= 0).all() and (cache.global_slots_N[27:] == -1).all()
    assert (cache.local_slots_N[:27] >= 0).all() and (cache.local_slots_N[27:] == -1).all()
    assert all(part.start % 32 == 0 for part in size.parts)
    full = Size(27, 4, 16)
    fields = torch.from_numpy(step_fields(works, full))
    assert fields[full.parts[-1]].tolist() == [0, 20, 27, 27, 27], "sequences without rows"


def test_the_last_used_sizes_are_kept() -> None:
    engine, recorder = engine_of("float32"), Again()
    graphs = replayed_by(engine, recorder, most=2)
    plain = engine_of("float32")
    for _ in range(2):
        assert outputs(engine) == outputs(plain)
        assert len(graphs) == 2
    assert len(recorder.recorded) > len(set(recorder.recorded)), "a dropped one came back"


class Broken(Again):
    """Cannot record some sizes."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.tried: list[Size] = []

    def __call__(
        self, forward: Forward, fields: Tensor, size: Size, found: tuple[Tensor, ...]
    ) -> Recorded:
        if size.rows % 2 == 0:
            self.tried.append(size)
            raise self.error
        return super().__call__(forward, fields, size, found)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("all is used"), RuntimeError("broken")])
def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = engine_of("float32"), Broken(error)
    replayed_by(engine, recorder)
    with caplog.at_level(logging.WARNING):
        assert outputs(engine) == outputs(engine_of("float32"))
    assert recorder.replayed
    assert recorder.tried
    assert len(recorder.tried) == len(set(recorder.tried)), "none is tried again"
    (said,) = caplog.messages
    assert str(error) in said


def test_a_size_that_was_refused_drops_none_that_is_recorded() -> None:
    engine, recorder = engine_of("float32"), Broken(RuntimeError("broken"))
    graphs = replayed_by(engine, recorder, most=1)
    assert not engine.runner.record(2)
    assert engine.runner.record(3)
    assert not engine.runner.record(2)
    assert list(graphs._recorded) == [Size(3, 0, 16)]


def test_the_largest_step_is_recorded_before_smaller_ones() -> None:
    engine, recorder = engine_of("float32", token_budget=30), Again()
    replayed_by(engine, recorder)
    outputs(engine)
    packed = [size for size in recorder.recorded if not size.is_decode]
    assert packed[0].rows == MOST_ROWS
    assert packed[1].rows < MOST_ROWS
    assert len(packed) == len(set(packed))


def test_sizes_recorded_ahead() -> None:
    engine, recorder = engine_of("float32"), Again()
    assert not engine.runner.record(20, 1)
    replayed_by(engine, recorder)
    plain = engine_of("float32")
    assert engine.runner.record(20, 2, 3)
    assert engine.runner.record(5)
    assert engine.runner.record(20, 2, routing=True)
    assert not engine.runner.record(MOST_ROWS + 1, 2)
    assert not engine.runner.record(13)
    found = list(recorder.recorded)
    assert Size(24, 3, 16) in found and Size(8, 0, 16) in found
    assert Size(24, 3, 16, more=True) in found
    assert engine.runner.record(20, 2, 3)
    assert recorder.recorded == found
    assert outputs(engine) == outputs(plain)


def golden_engine(device: str = "cpu", *, graphs: bool = True) -> Engine:
    model = golden_model("base", torch.bfloat16, device)
    sizes = {"page_size": 16, "token_budget": 64}
    return engine_of("bfloat16", device, model, cuda_graphs=graphs, **sizes)


def test_recorded_steps_of_the_golden_model() -> None:
    engine, recorder = golden_engine(), Again()
    replayed_by(engine, recorder).at_once = True
    assert outputs(engine) == outputs(golden_engine())
    assert sum(not size.is_decode for size in recorder.replayed) > 5


def test_sizes_recorded_when_they_are_first_wanted() -> None:
    engine, recorder = engine_of("float32"), Again()
    replayed_by(engine, recorder).at_once = True
    assert outputs(engine, 30) == outputs(engine_of("float32"), 30)
    packed = [size for size in recorder.replayed if not size.is_decode]
    assert len(packed) > 4


def test_sizes_and_widths() -> None:
    sizes = Sizes(
        decode=(1, 2, 8), rows=(16, 64, 256), sequences=(1, 2, 5), max_blocks=50, page_size=4
    )
    assert sizes.holding(1, 0, 1) == Size(1, 0, 16)
    assert sizes.holding(3, 0, 16) == Size(8, 0, 16)
    assert sizes.holding(8, 0, 17) == Size(8, 0, 32)
    assert sizes.holding(8, 0, 33) == Size(8, 0, 50), "no wider than the tables are"
    assert sizes.holding(9, 0, 1) is None
    assert sizes.holding(16, 1, 1) == Size(16, 1, 16)
    assert sizes.holding(15, 1, 1) == Size(16, 2, 16), "padding is a sequence"
    assert sizes.holding(60, 5, 1) is None
    assert sizes.holding(64, 5, 1) == Size(64, 5, 16)
    assert sizes.holding(65, 2, 17) == Size(256, 5, 50), "pages of 191 rows of padding"
    assert sizes.holding(257, 1, 1) is None
    assert sizes.num_fields == Size(256, 5, 50).num_fields


def test_every_batch_has_a_size_with_little_padding() -> None:
    for most in (1, 5, 8, 12, 64, 100, 512, 3000):
        sizes = decode_buckets(most)
        assert sizes[-1] == min(most, 512)
        assert sorted(set(sizes)) == list(sizes)
        assert sizes[: min(most, 8)] == tuple(range(1, min(most, 8) + 1))
        assert all(b - a <= 8 for a, b in itertools.pairwise(sizes))
        assert max_graphs(most) == len(sizes) + 96
        sequences = sequence_buckets(most)
        assert sequences[0] == 1 and sequences[-1] == most + 1
        assert sorted(set(sequences)) == list(sequences)
        assert all(b <= 2 * a for a, b in itertools.pairwise(sequences))


def test_every_prompt_has_a_size_with_little_padding() -> None:
    for budget in (1, 16, 100, 2048, 3000, 8192):
        rows = row_buckets(budget)
        assert rows[-1] == min(budget, 8192)
        assert sorted(set(rows)) == list(rows)
        assert all(b - a <= max(16, b // 5) for a, b in itertools.pairwise(rows))
        assert all(b - a <= b // 16 for a, b in itertools.pairwise(rows) if a >= 2048)
    assert {64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512} <= set(row_buckets(8192))
    assert len(row_buckets(8192)) < 64


def test_prompt_logprobs_of_recorded_chunks() -> None:
    prompt = list(range(100, 124))
    wanted = SamplingParams(
        max_tokens=4, temperature=0.0, prompt_logprobs=2, ignore_eos=True, detokenize=False
    )
    found: list[Any] = []
    for chunk in (1, 5, 16, None):
        engine, recorder = engine_of("float32", max_chunk=chunk), Again()
        replayed_by(engine, recorder)
        for turn in range(3):
            request = engine.add(f"{turn}", prompt, wanted, salt=turn)
            events = engine.run()
            found.append(([event.token for event in events], request.prompt_logprobs))
        assert len(recorder.replayed) > 3
        if chunk != 1:
            assert any(not size.is_decode for size in recorder.replayed)
    assert all(x == found[0] for x in found)


def test_a_size_that_runs_out_of_memory_is_not_padded_again() -> None:
    """The step ends, since its state may be half written; the next one of the size is no larger
    than its tokens."""
    engine = engine_of("float32")
    recorder = Again()
    graphs = replayed_by(engine, recorder)
    graphs.at_once = True
    engine.add("a", [5] * 9, SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    works, failures = engine.scheduler.schedule().works, 0

    def failing(fields: Tensor, size: Size) -> tuple[Tensor, ...]:
        nonlocal failures
        failures += 1
        raise torch.OutOfMemoryError("all is used")

    graphs._has_room = True  # or the largest size fails first, which is refused in the same way
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(failing, works)
    assert graphs.run(failing, works) is None
    assert failures == 1 and not recorder.recorded


def test_no_room_for_a_single_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="most = 0"):
        replayed_by(engine_of("float32"), Again(), most=0)


def test_a_media_token_is_not_replayed() -> None:
    engine = engine_of("float32")
    engine.add("a", [5], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
    works = engine.scheduler.schedule().works
    assert is_text(works)
    works[0].sequence.request.media = (object(),)  # pyright: ignore[reportAttributeAccessIssue]
    assert not is_text(works)
    works[0].start = 1
    assert is_text(works)


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


def packed_sizes(engine: Engine) -> list[Size]:
    graphs = engine.runner.graphs
    assert graphs is not None
    return [size for size in graphs._recorded if not size.is_decode]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("budget", [30, 2048])
def test_captured_steps_on_a_gpu(dtype: str, at_once: bool, budget: int) -> None:
    subject, plain = (
        engine_of(dtype, "cuda", cuda_graphs=on, token_budget=budget) for on in (True, False)
    )
    assert plain.runner.graphs is None
    assert subject.runner.graphs is not None
    subject.runner.graphs.at_once = at_once
    for _ in range(2):
        assert outputs(subject) == outputs(plain)
    assert len(subject.runner.graphs) > 5
    assert len(packed_sizes(subject)) >= 2
    assert not subject.runner.graphs._refused


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_captured_steps_of_the_golden_model_on_a_gpu() -> None:
    subject = golden_engine("cuda")
    assert subject.runner.graphs is not None
    subject.runner.graphs.at_once = True
    assert outputs(subject) == outputs(golden_engine("cuda", graphs=False))
    assert packed_sizes(subject)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_failing_capture_harms_nothing_on_a_gpu() -> None:
    subject, plain = engine_of("bfloat16", "cuda"), engine_of("bfloat16", "cuda", cuda_graphs=False)
    runner, forward = subject.runner, subject.runner.step_rows

    def failing(fields: Tensor, size: Size) -> tuple[Tensor, ...]:
        rows = forward(fields, size)
        if size.rows % 2 == 0 and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("all is used")
        return rows

    runner.step_rows = failing
    graphs = runner.graphs
    assert graphs is not None
    graphs.at_once = True
    assert outputs(subject) == outputs(plain)
    assert graphs._refused and len(graphs)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_dropped_graphs_on_a_gpu() -> None:
    subject, plain = engine_of("bfloat16", "cuda"), engine_of("bfloat16", "cuda", cuda_graphs=False)
    graphs = subject.runner.graphs
    assert graphs is not None
    graphs._most = 2
    assert outputs(subject) == outputs(plain)
    assert len(graphs) == 2


def doubled(fields: Tensor, size: Size) -> tuple[Tensor, ...]:
    return (fields[: size.rows] * 2,)


def synchronising(fields: Tensor, size: Size) -> tuple[Tensor, ...]:
    """CUDA does not let a capture go on after this."""
    if torch.cuda.is_current_stream_capturing():
        fields.sum().item()
    return doubled(fields, size)


def without_memory(fields: Tensor, size: Size) -> tuple[Tensor, ...]:
    torch.empty(2**50, dtype=torch.uint8, device=fields.device)
    return doubled(fields, size)


def assert_records(recorder: CudaRecorder, fields: Tensor, value: int) -> Recorded:
    size = Size(4, 1, 1)
    step = recorder(doubled, fields, size, doubled(fields, size))
    fields.fill_(value)
    step.replay()
    assert step.rows[0].tolist() == [2 * value] * 4
    return step


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_recorder_goes_on_when_all_its_graphs_are_gone() -> None:
    device = torch.device("cuda")
    recorder, fields = CudaRecorder(device, most_rows=8), torch.ones(16, device=device)
    for value in range(3):
        seen = weakref.ref(assert_records(recorder, fields, value))
        assert seen() is None, "the graph lives on"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("failing", [synchronising, without_memory])
@pytest.mark.parametrize("begun", [False, True])
def test_a_recorder_goes_on_after_a_failed_capture(failing: Forward, begun: bool) -> None:
    """The first of its captures or a later one; and memory can be had and given back as before."""
    device, size = torch.device("cuda"), Size(4, 1, 1)
    recorder, fields = CudaRecorder(device, most_rows=8), torch.ones(16, device=device)
    kept = [assert_records(recorder, fields, 5)] if begun else []
    for value in range(2):
        with pytest.raises(RuntimeError):
            recorder(failing, fields, size, doubled(fields, size))
        assert not torch.cuda.is_current_stream_capturing()
        with pytest.raises(torch.OutOfMemoryError):  # which gives cached memory back first
            torch.empty(2**50, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()
        kept.append(assert_records(recorder, fields, value))
    fields.fill_(9)
    for step in kept:
        step.replay()
        assert step.rows[0].tolist() == [18] * 4
