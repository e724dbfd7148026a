"""What an engine does before its first request: nothing that serving launches is missing from the
walk, the walk launches nothing, and no failure keeps the engine from serving."""

import logging
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from suzuri.engine import preparation
from suzuri.engine.compilation import Outcome
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.launches import launch_key
from suzuri.engine.preparation import Preparation
from suzuri.engine.rehearsal import (
    one_of_each_kind,
    token_sizes,
    walk,
    widths,
)
from suzuri.kernels.matmul import buckets
from suzuri.processing.vocabulary import FullVocabulary
from tests.engine.apart import run_apart
from tests.engine.rehearsed import SMALL, gpu_engine, load
from tests.kernels.on_triton import in_interpreter
from tests.kernels.triton_interpreter import patch_loop_bounds
from tests.model.models import random_model


def tiny_engine(**fields: Any) -> Engine:
    model = random_model("tiny").requires_grad_(False)
    pools: dict[str, Any] = {"global_pages": 80, "local_pages": 80, "snapshots": 9}
    config = EngineConfig(dtype="float32", page_size=16, **(SMALL | pools | fields))
    return Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())


def test_the_walk_sees_all_that_a_load_launches() -> None:
    """As Triton tells kernels apart, which the interpreter does not; nothing runs."""
    assert not run_apart("rehearsed", "1", "2")


@in_interpreter
def test_steps_that_run_launch_what_was_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loop_bounds(monkeypatch)
    real: dict[Hashable, str] = {}
    run = InterpretedFunction.run

    def seen(self: Any, *args: Any, grid: Any, warmup: bool, **words: Any) -> Any:
        real.setdefault(launch_key(self, args, words), self.fn.__qualname__)
        return run(self, *args, grid=grid, warmup=warmup, **words)

    with gpu_engine(torch.float32, **SMALL) as engine:
        walked, _ = walk(engine.runner, engine.vocabulary)
        monkeypatch.setattr(InterpretedFunction, "run", seen)
        with buckets.untested([]):
            load(engine, 5, 2, longest=20, tokens=5)
    assert len(real) > 15
    assert {name for key, name in real.items() if key not in walked.keys} == set()


def test_the_walk_changes_no_state_and_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(self: Any, *args: Any, **words: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    with gpu_engine(torch.float32, **SMALL) as engine:
        cache = engine.runner.cache
        held = [x for layer in cache.layers for x in vars(layer).values()]
        for tensor in held:
            tensor.fill_(3.0)
        blocks = engine.model.decoder.blocks
        shown: list[tuple[int, int]] = []
        walked, shapes = walk(
            engine.runner, engine.vocabulary, lambda *numbers: shown.append(numbers)
        )
        assert walked.count > 1000
        assert not walked.problems
        assert not shapes, "no product of the tiny model is one for the library"
        for tensor in held:
            assert (tensor == 3.0).all()  # page 0 and slot 0 too: nothing is launched
        assert engine.model.decoder.blocks == blocks
        assert engine.runner.replays
        assert not engine.runner.sampler.tables.num_used
        assert [done for done, _ in shown] == list(range(shown[0][1]))
        engine.check()


def test_one_layer_of_each_kind_is_walked() -> None:
    decoder = random_model("tiny").decoder
    blocks = decoder.blocks
    with one_of_each_kind(decoder):
        few = decoder.blocks
        kinds = {(type(layer.mlp), layer.attn.config.is_local) for layer in blocks}
        assert {(type(layer.mlp), layer.attn.config.is_local) for layer in few} == kinds
        assert len(few) == len(kinds) < len(blocks)
    assert decoder.blocks == blocks


def test_sizes_stand_for_all() -> None:
    sizes = token_sizes(300)
    assert sizes[0] == 300
    assert sizes == sorted(sizes, reverse=True)
    for tokens in range(1, 301):
        assert any(-(-size // 64) == -(-tokens // 64) for size in sizes)
    assert {1, 64, 63, 256, 255} <= set(sizes)
    assert widths(20) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 20]


def test_products_are_noted_and_not_tested() -> None:
    asked: list[buckets.Shape] = []
    with buckets.untested(asked):
        for _ in range(2):
            found = buckets.equal_buckets(
                64, 128, torch.bfloat16, torch.bfloat16, torch.device("cuda")
            )
            assert found == ()
    assert asked == [(64, 128, torch.bfloat16, torch.bfloat16)]


class Compiler:
    """Stands for the process that compiles."""

    problem: str | None = "it is not there"

    def compile(self, kernels: Any, show: Any = None) -> Outcome:
        return Outcome()

    def close(self) -> None: ...


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Preparation:
    monkeypatch.setattr(preparation, "Compiler", Compiler)
    return Preparation()


def test_what_fails_is_told_and_the_engine_serves(
    prepared: Preparation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no way")

    monkeypatch.setattr(preparation, "walk", broken)
    monkeypatch.setattr(preparation, "load", broken)
    engine, said = tiny_engine(), list[str]()
    with caplog.at_level(logging.INFO):
        done = prepared.prepare(engine, lambda what, *_: said.append(what))
    assert done.problems == ["walk: RuntimeError: no way", "compile: RuntimeError: no way"]
    assert "no way" in caplog.text
    assert "it is not there" in caplog.text
    assert "ready: walk" in caplog.text
    assert said[-1] == "running a first request"
    load(engine, 2, 3, longest=20, tokens=5)
    engine.check()


@in_interpreter
def test_a_preparation_does_its_phases_in_turn(
    prepared: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loop_bounds(monkeypatch)
    phases: list[str] = []

    def loaded(kernels: Any, device: torch.device, show: Any) -> Outcome:
        phases.append("load")
        assert len(kernels) > 20
        return Outcome(compiled=3, problems={"one": "is faulty"})

    def ran(engine: Engine) -> None:
        phases.append("first request")

    monkeypatch.setattr(preparation, "load", loaded)
    monkeypatch.setattr(preparation, "warm_up", ran)
    with gpu_engine(torch.float32, **SMALL) as engine:
        done = prepared.prepare(engine)
    assert phases == ["load", "first request"]
    assert (done.compiled, done.cached) == (3, done.kernels - 4)
    assert done.problems == ["one: is faulty"]
    assert list(done.seconds) == ["walk", "compile", "first request"]


def test_an_engine_without_weights_runs_nothing(
    prepared: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What weights that are not there yet would compute must not reach its pages."""

    def ran(engine: Engine) -> None:
        raise AssertionError("a request ran")

    monkeypatch.setattr(preparation, "warm_up", ran)
    monkeypatch.setattr(preparation, "load", lambda *_: Outcome())
    with gpu_engine(torch.float32, **SMALL) as engine:
        done = prepared.prepare(engine, has_weights=False)
    assert done.kernels > 20
    assert not done.problems


@pytest.mark.gpu
def test_nothing_is_compiled_after_a_preparation() -> None:
    from triton import knobs

    model = random_model("tiny", torch.bfloat16).requires_grad_(False).to("cuda")
    config = EngineConfig(
        max_context=400, max_running=20, page_size=16, token_budget=200,
        global_pages=900, local_pages=900, snapshots=40,
    )  # fmt: skip
    engine = Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())
    subject = Preparation()
    try:
        done = subject.prepare(engine)
    finally:
        subject.close()
    assert not done.problems
    assert done.graphs >= 8
    late: list[str] = []

    def hook(**words: Any) -> None:
        late.append(words["repr"])

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, hook
    try:
        load(engine, 7, 40)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not late
    engine.check()
