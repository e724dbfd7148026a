"""Recorded experts are those that one forward over the same tokens chooses, bit for bit."""

import collections
import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.engine import runner
from suzuri.engine.outputs import OutputBuilder
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.batch import Routes, pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.inkling import Inkling
from tests.engine.recorded import Again, replayed_by
from tests.engine.routing import asking, assert_same_routing, check_record, engine_of, run, whole
from tests.model.models import golden_model, random_ids, random_model

DTYPES = ("float32", "bfloat16")
HAS_GPU = torch.cuda.is_available()
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@functools.cache
def tiny(dtype: str = "float32") -> Inkling:
    return random_model("tiny", getattr(torch, dtype)).requires_grad_(False)


def ids(count: int, seed: int = 0) -> list[int]:
    return random_ids(tiny(), count, seed)


@each_dtype
@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("overlap", [True, False])
def test_prefill_in_chunks_and_decoding(dtype: str, chunk: int | None, overlap: bool) -> None:
    model = tiny(dtype)
    engine = engine_of(model, dtype, max_chunk=chunk, overlap=overlap)
    requests = [engine.add(str(i), ids(n, i), asking(9)) for i, n in enumerate((23, 5, 1))]
    run(engine)
    for request in requests:
        (sequence,) = request.sequences
        found = sequence.routed
        assert found is not None
        text = model.config.text
        assert found.experts_TLK.shape == (sequence.length - 1, text.num_moe_layers, 2)
        assert found.weights_TLJ.shape == (sequence.length - 1, text.num_moe_layers, 4)
        assert found.weights_TLJ.dtype == np.float32
        assert (np.diff(found.experts_TLK.astype(int)) > 0).all(), "slots are in order of ids"
        check_record(model, sequence)


@each_dtype
def test_prefix_hits(dtype: str) -> None:
    """At the end of a prompt, at the end of a turn, and for the samples of one request."""
    model = tiny(dtype)
    engine = engine_of(model, dtype)
    prompt = ids(30)
    first = engine.add("first", prompt, asking())
    run(engine)
    turn = first.sequences[0].tokens
    again = engine.add("again", prompt, asking(seed=1))
    goes_on = engine.add("goes on", [*turn, *ids(7, 1)], asking())
    several = engine.add("several", ids(21, 2), asking(n=3))
    run(engine)
    assert again.sequences[0].num_cached == 29
    assert goes_on.sequences[0].num_cached == len(turn) - 1
    assert [one.num_cached for one in several.sequences] == [0, 20, 20]
    for request in (first, again, goes_on, several):
        for sequence in request.sequences:
            check_record(model, sequence)


def test_hits_are_of_requests_that_ask_too() -> None:
    """What nobody recorded is run again; those that do not ask see nothing of it."""
    engine = engine_of(tiny())
    prompt = ids(30)
    plain = dataclasses.replace(asking(), routing=False)
    found: list[list[int]] = []
    for name, params, cached in (
        ("plain", plain, 0),
        ("asks", asking(), 0),
        ("plain again", plain, 29),
        ("asks again", asking(), 29),
    ):
        request = engine.add(name, prompt, params)
        run(engine)
        (sequence,) = request.sequences
        assert sequence.num_cached == cached, name
        found.append(sequence.tokens)
        if params.routing:
            check_record(tiny(), sequence)
        else:
            assert sequence.routed is None
    assert found.count(found[0]) == 4, "recording changes no token"


@pytest.mark.parametrize("cached", [True, False])
def test_without_a_prefix_cache_samples_of_a_prompt_share_it(cached: bool) -> None:
    engine = engine_of(tiny(), prefix_cache=cached)
    request = engine.add("a", ids(18), asking(4, n=4))
    run(engine)
    assert [one.num_cached for one in request.sequences] == [0, 17, 17, 17]
    for sequence in request.sequences:
        check_record(tiny(), sequence)


@pytest.mark.parametrize("cached", [True, False])
@each_dtype
def test_preempted_sequences(dtype: str, cached: bool) -> None:
    model = tiny(dtype)
    pools = {"global_pages": 30, "local_pages": 30, "snapshots": 8}
    engine = engine_of(model, dtype, max_context=64, prefix_cache=cached, **pools)
    requests = [engine.add(str(i), ids(36, i), asking(24, seed=i)) for i in range(4)]
    run(engine)
    assert engine.scheduler.counters.preemptions > 0
    for request in requests:
        check_record(model, request.sequences[0])


def test_a_mixture_of_those_that_ask_and_those_that_do_not() -> None:
    engine = engine_of(tiny(), max_chunk=4, token_budget=9)
    requests = [
        engine.add(str(i), ids(3 + 5 * i, i), asking(8, routing=i % 2 == 0)) for i in range(6)
    ]
    run(engine)
    for i, request in enumerate(requests):
        if i % 2 == 0:
            check_record(tiny(), request.sequences[0])
        else:
            assert request.sequences[0].routed is None


def test_nobody_pays_who_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a record was begun")

    monkeypatch.setattr(runner, "Routes", never)
    engine = engine_of(tiny())
    engine.add("a", ids(10), asking(routing=False))
    run(engine)
    engine.add("b", ids(10), asking())
    with pytest.raises(AssertionError, match="a record was begun"):
        run(engine)


@each_dtype
def test_recorded_steps(dtype: str) -> None:
    """With padding rows, and beside steps of the same size in which nobody asks."""
    model = tiny(dtype)
    engine, recorder = engine_of(model, dtype), Again()
    replayed_by(engine, recorder)
    plain = asking(20, routing=False)
    for i in range(3):
        engine.add(f"plain {i}", ids(4, i), plain)
    run(engine)
    requests = [
        engine.add(str(i), ids(4 + i, i), asking(20, seed=i, routing=i != 1)) for i in range(3)
    ]
    run(engine)
    replayed = collections.Counter((size.is_decode, size.more) for size in recorder.replayed)
    assert replayed[True, False] > 5
    assert replayed[True, True] > 5
    for i in (0, 2):
        check_record(model, requests[i].sequences[0])
    for turn in range(4):
        requests = [engine.add(f"{i}", ids(20, 9 + 3 * turn + i), asking(1)) for i in range(3)]
        run(engine)
    replayed = collections.Counter((size.is_decode, size.more) for size in recorder.replayed)
    assert replayed[False, True] > 1
    for request in requests:
        check_record(model, request.sequences[0])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@each_dtype
def test_captured_steps_on_a_gpu(dtype: str) -> None:
    model = random_model("tiny", getattr(torch, dtype)).requires_grad_(False).to("cuda")
    engine = engine_of(model, dtype)
    assert engine.runner.graphs is not None
    for i in range(4):
        engine.add(f"plain {i}", ids(9 + i, i), asking(20, seed=i, routing=False))
    run(engine)
    plain = len(engine.runner.graphs)
    for turn in range(2):
        requests = [
            engine.add(f"{turn} {i}", ids(9 + i, i), asking(20, seed=i, routing=i != 1))
            for i in range(4)
        ]
        run(engine)
        for i in (0, 2, 3):
            check_record(model, requests[i].sequences[0])
    # Steps that record the experts are graphs of their own.
    assert len(engine.runner.graphs) > plain > 0


@each_dtype
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_window_of_drafts_that_is_taken_back(dtype: str, accepted: int) -> None:
    """What speculation will do: rows of wrong drafts run and are run again with the true tokens."""
    model, tokens = tiny(dtype), ids(20)
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=1,
        max_tokens=24,
        dtype=model.decoder.norm.weight.dtype,
        page_size=4,
        undo=4,
    )

    def rows(first: int, piece: list[int]) -> tuple[Any, Any]:
        routes = Routes(model.config.text.num_moe_layers)
        view = cache.view([0], [first], [len(piece)])
        batch = pack([piece], first_positions=[first], cache=view)
        with torch.no_grad():
            model.decoder(dataclasses.replace(batch, routes=routes))
        experts_NLK, weights_NLJ = routes.stacked()
        return experts_NLK.numpy(), weights_NLJ.numpy()

    engine = engine_of(model, dtype)
    (sequence,) = engine.add("a", tokens, asking()).sequences
    record = sequence.routing
    assert record is not None
    record.put(0, *rows(0, tokens[:12]))
    drafts = [*tokens[12 : 12 + accepted], *((t + 1) % 100 for t in tokens[12 + accepted : 16])]
    record.put(12, *rows(12, drafts))
    record.put(12 + accepted, *rows(12 + accepted, tokens[12 + accepted :]))
    assert_same_routing(record.first(20), whole(model, tokens))


def test_new_weights_half_way() -> None:
    """A token from which one was drawn keeps the experts of the weights that drew; a sequence that
    has none begins anew, and nobody resumes from a mixture."""
    old, new = copy.deepcopy(tiny()), copy.deepcopy(tiny())
    with torch.no_grad():
        for name, weight in new.named_parameters():
            if name.endswith("router.weight"):
                weight.copy_(weight.flip(0))
    engine = engine_of(copy.deepcopy(old), max_chunk=8)
    prompt = ids(20)
    drawing = engine.add("drawing", prompt, asking(12, n=2))
    while len(drawing.sequences[1].tokens) < 23:
        engine.step()
    reading = engine.add("reading", ids(30, 1), asking())
    engine.step()
    assert 0 < reading.sequences[0].computed < 30
    weights = dict(new.named_parameters())

    def update() -> None:
        with torch.no_grad():
            for name, tensor in engine.model.named_parameters():
                tensor.copy_(weights[name])

    engine.update_weights(update)
    drawn = [len(sequence.tokens) - 1 for sequence in drawing.sequences]
    run(engine)
    after = engine.add("after", [*prompt, *ids(3, 2)], asking())
    engine.add("same", prompt, asking())
    run(engine)
    for sequence, count in zip(drawing.sequences, drawn, strict=True):
        assert count > 20
        found = sequence.routed
        assert found is not None
        before, now = (whole(model, sequence.tokens[:-1]) for model in (old, new))
        for mine, theirs, ours in zip(found, before, now, strict=True):
            assert (theirs != ours).any()
            assert np.array_equal(mine, np.concatenate([theirs[:count], ours[count:]]))
    for request in (reading, after):
        check_record(new, request.sequences[0])
    assert after.sequences[0].num_cached == 0


def test_what_has_run_by_the_time_of_an_abort() -> None:
    engine = engine_of(tiny(), max_chunk=5, overlap=False)
    request = engine.add("a", ids(30), asking())
    (sequence,) = request.sequences
    for count in (0, 5, 10):
        found = sequence.routed
        assert found is not None
        assert found.experts_TLK.shape == (count, tiny().config.text.num_moe_layers, 2)
        engine.step()
    engine.abort("a")
    run(engine)
    expected = whole(tiny(), ids(30)[:15])
    assert_same_routing(sequence.routed, expected)


def test_outputs_have_what_was_asked_for() -> None:
    engine = engine_of(tiny())
    for name, params in (("a", asking(n=2)), ("b", asking(routing=False))):
        request = engine.add(name, ids(9), params)
        builder = OutputBuilder(request, None, request.prompt)
        for event in run(engine):
            builder.add(event)
        for sample, sequence in zip(
            builder.build(lambda ids: "").outputs, request.sequences, strict=True
        ):
            if params.routing:
                assert_same_routing(sample.routing, whole(tiny(), sequence.tokens[:-1]))
            else:
                assert sample.routing is None


def test_models_without_a_byte_for_each_expert_are_refused() -> None:
    engine = engine_of(tiny())
    text = dataclasses.replace(engine.model.config.text, n_routed_experts=257)
    many = copy.copy(engine.model)
    many.config = dataclasses.replace(engine.model.config, text=text)
    engine.model = many
    with pytest.raises(ValueError, match=r"routing: .* 257 routed experts, .* at most 256"):
        engine.add("a", [5], asking())
    dense = engine_of(golden_model("alldense"))
    with pytest.raises(ValueError, match="routing: this model has no routed experts"):
        dense.add("a", [5], asking())
    dense.add("a", [5], asking(routing=False))


def test_the_flag_is_a_flag() -> None:
    with pytest.raises(ValueError, match="routing = 1: must be true or false"):
        SamplingParams(routing=1)  # pyright: ignore[reportArgumentType]
