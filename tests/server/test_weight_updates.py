"""New weights in the engine's process, turn by turn: what waits for what, and what is told."""

import asyncio
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.engine.messages import (
    Abort,
    Accepted,
    Add,
    Event,
    OnPublish,
    Refused,
    Step,
    UpdateRefused,
    UpdateWeights,
    WeightsUpdated,
    encode,
)
from suzuri.engine.new_weights import NewWeights, WeightsLost
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.worker import Worker
from suzuri.model.inkling import Inkling
from suzuri.processing.tokenizer import Tokenizer
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.publication import write_weights
from suzuri.types import Prompt, SampleParams
from tests.model.models import random_model
from tests.rl.test_local_sampler import engine_of

TOKENS = 12


class Process:
    """A worker without its process: it takes what it is given, and says what it would send."""

    def __init__(self, folder: Path, model: Inkling) -> None:
        self.worker: Any = Worker(str(folder))
        self.engine = engine_of(model)
        self.said: list[Any] = []
        self.worker._report = self.said.append
        self.worker._updates._report = self.said.append
        self.worker._allows_updates = True
        self.worker._token_bytes = Tokenizer().token_bytes

    def take(self, message: Any) -> None:
        self.worker._take(self.engine, encode(message))

    def add(self, id: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=TOKENS, seed=id, sampled_logprobs=True)
        self.take(Add(id=id, prompt=[5 + id, 6, 7], params=params, **fields))

    def turn_until(self, found: Any) -> None:
        for _ in range(100_000):
            if found():
                return
            self.worker.turn(self.engine)
        raise AssertionError("it never comes")

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]

    def events(self, id: int) -> list[Event]:
        steps = (event for step in self.of(Step) for event in step.events)
        return [event for event in steps if event.id == id]

    def tokens(self, id: int) -> list[tuple[int, int]]:
        """(token, version) since it began last."""
        events = self.events(id)
        begins = [place for place, event in enumerate(events) if event.restarted]
        kept = events[begins[-1] if begins else 0 :]
        return [(event.token, event.version) for event in kept if event.token is not None]

    def has_ended(self, id: int) -> bool:
        return any(event.finish is not None for event in self.events(id))


@pytest.fixture(scope="module")
def model() -> Inkling:
    return random_model("tiny", torch.bfloat16)


@pytest.fixture(scope="module")
def other(model: Inkling) -> Inkling:
    found = copy.deepcopy(model)
    with torch.no_grad():
        found.decoder.norm.weight.mul_(1.5)
    return found


@pytest.fixture(scope="module")
def folder(other: Inkling, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "other"
    write_weights(other, path)
    return str(path)


@pytest.fixture
def process(tmp_path: Path, model: Inkling) -> Iterator[Process]:
    made = Process(tmp_path, model)
    yield made
    made.worker._context.destroy(linger=0)


def expected(model: Inkling, id: int) -> list[int]:
    sampler = LocalSampler(engine_of(model))
    params = SampleParams(max_tokens=TOKENS, seed=id)
    answer = asyncio.run(sampler.sample(Prompt(tokens=[5 + id, 6, 7]), params))
    return list(answer.tokens)


def test_weights_wait_for_what_runs_and_hold_up_what_comes(
    process: Process, model: Inkling, other: Inkling, folder: str
) -> None:
    process.add(1)
    process.take(UpdateWeights(id=9, folder=folder, version=7))
    process.turn_until(lambda: process.worker._updates.holds_requests or process.of(WeightsUpdated))
    if not process.of(WeightsUpdated):
        process.add(2)
        process.add(3)
        process.take(Abort(3))
        assert [one.id for one in process.of(Accepted)] == [1], "2 is not let in yet"
    else:
        raise AssertionError("they did not wait for request 1")
    process.turn_until(lambda: process.has_ended(2))
    assert process.tokens(1) == [(token, 0) for token in expected(model, 1)]
    assert process.tokens(2) == [(token, 7) for token in expected(other, 2)]
    assert not process.events(3)
    (updated,) = process.of(WeightsUpdated)
    assert (updated.id, updated.version) == (9, 7)
    assert process.engine.weight_version == 7


def test_a_deadline_counts_while_a_request_is_held_up(process: Process, folder: str) -> None:
    process.add(1)
    process.take(UpdateWeights(id=9, folder=folder))
    process.turn_until(lambda: process.worker._updates.holds_requests)
    process.add(2, deadline=1e-9)
    process.turn_until(lambda: process.has_ended(2))
    assert [event.finish for event in process.events(2)] == ["deadline"]


@pytest.mark.parametrize("on_publish", ["continue", "restart"])
def test_only_what_may_restart_does(
    process: Process, model: Inkling, other: Inkling, folder: str, on_publish: OnPublish
) -> None:
    process.add(1, may_restart=True)
    process.add(2)
    process.turn_until(lambda: len(process.tokens(1)) > 2 and len(process.tokens(2)) > 2)
    # Before the next step, so that both are cut.
    weights = NewWeights(process.engine.model, folder, None)
    weights.close()
    asked = UpdateWeights(id=9, folder=folder, on_publish=on_publish)
    process.worker._updates.begin(process.engine, asked)
    process.worker._updates._coming.weights.result()
    process.turn_until(lambda: process.has_ended(1) and process.has_ended(2))
    for id in (1, 2):
        found = process.tokens(id)
        kept = [token for token, version in found if version == 0]
        rest = [token for token, version in found if version == 1]
        if id == 1 and on_publish == "restart":
            assert not kept and rest == expected(other, id)
        else:
            assert kept == expected(model, id)[: len(kept)] and len(kept) > 2 and rest
            assert [token for token, _ in found] == kept + rest
    assert sum(event.restarted for event in process.events(1)) == (on_publish == "restart")
    assert not any(event.restarted for event in process.events(2))
    assert not process.of(Refused)
    assert weights.content_hash == process.of(WeightsUpdated)[0].content_hash
    process.engine.check()


def test_the_same_twice_is_one_and_another_is_refused(process: Process, folder: str) -> None:
    process.add(1)
    process.take(UpdateWeights(id=7, folder=folder, version=1, replaces=0))
    process.take(UpdateWeights(id=8, folder=folder, version=1, replaces=0))
    process.take(UpdateWeights(id=9, folder=folder, version=2))
    (refused,) = process.of(UpdateRefused)
    assert refused.id == 9 and "on their way" in refused.error and refused.kind == "conflict"
    process.turn_until(lambda: process.of(WeightsUpdated))
    first, second = process.of(WeightsUpdated)
    assert (first.id, second.id) == (7, 8) and first.version == second.version == 1
    digest = first.content_hash
    process.take(UpdateWeights(id=10, folder="/gone", version=1, replaces=0, content_hash=digest))
    assert process.of(WeightsUpdated)[-1].id == 10, "it is there already"


def test_weights_that_were_written_in_part_are_the_end_of_the_process(
    process: Process, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = NewWeights.write

    def write(self: NewWeights) -> None:
        reader: Any = self._reader
        wanted: Any = self._wanted
        del wanted[len(wanted) // 2 :]
        assert reader is not None
        real(self)

    monkeypatch.setattr(NewWeights, "write", write)
    process.take(UpdateWeights(id=9, folder=folder))
    with pytest.raises(WeightsLost, match="were written"):
        process.turn_until(lambda: process.of(WeightsUpdated))
    (refused,) = process.of(UpdateRefused)
    assert refused.kind == "lost"


def test_a_file_that_ends_while_it_is_written_is_the_end_of_the_process(
    process: Process, other: Inkling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(other, tmp_path / "other")
    (file,) = (tmp_path / "other").glob("model-*.safetensors")
    real = NewWeights.write

    def write(self: NewWeights) -> None:
        file.write_bytes(b"")
        real(self)

    monkeypatch.setattr(NewWeights, "write", write)
    process.take(UpdateWeights(id=9, folder=str(tmp_path / "other")))
    with pytest.raises(WeightsLost, match="could not be read to their end"):
        process.turn_until(lambda: process.of(WeightsUpdated))
    assert process.of(UpdateRefused)[0].kind == "lost"


def test_a_folder_that_goes_once_it_has_been_read_is_no_matter(
    process: Process, other: Inkling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent it may have given up waiting."""

    write_weights(other, tmp_path / "other")
    real = NewWeights.write

    def write(self: NewWeights) -> None:
        shutil.rmtree(tmp_path / "other")
        real(self)

    monkeypatch.setattr(NewWeights, "write", write)
    process.take(UpdateWeights(id=9, folder=str(tmp_path / "other")))
    process.turn_until(lambda: process.of(WeightsUpdated))
    process.add(1)
    process.turn_until(lambda: process.has_ended(1))
    assert process.tokens(1) == [(token, 1) for token in expected(other, 1)]
