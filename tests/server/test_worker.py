"""The engine's process without a process: how requests wait for their grammars."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from suzuri.engine import worker as module
from suzuri.engine.messages import Abort, Add, Refused, encode
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.worker import Worker
from suzuri.processing.grammar_request import GrammarSpec, text_grammar
from tests.server.fakes import Clock


class Compiler:
    """Compiles nothing until it is told to."""

    def __init__(self) -> None:
        self.submitted: list[GrammarSpec] = []
        self.futures: dict[GrammarSpec, Future[Any]] = {}

    def knows(self, spec: GrammarSpec) -> bool:
        return spec in self.futures

    def submit(self, spec: GrammarSpec) -> Future[Any]:
        if spec not in self.futures:
            self.submitted.append(spec)
            self.futures[spec] = Future()
        return self.futures[spec]


class Waiting:
    """A worker without an engine: what it would add, and what it says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.worker: Any = Worker(str(folder))
        self.compiler, self.clock = Compiler(), Clock()
        self.said: list[Any] = []
        self.added: list[int] = []
        self.worker._compiler = self.compiler
        patch.setattr(module, "time", self.clock)
        self.worker._report = self.said.append
        self.worker._add = lambda engine, add, grammar, since: self.added.append(add.id)

    def send(self, id: int, spec: GrammarSpec) -> None:
        add = Add(id=id, prompt=[1], params=SamplingParams(), grammar=spec)
        self.worker._take(None, encode(add))

    def abort(self, id: int) -> None:
        class Nothing:
            def abort(self, id: str) -> bool:
                return False

        self.worker._take(Nothing(), encode(Abort(id)))

    def look(self, now: float | None = None) -> None:
        self.clock.now = self.clock.now if now is None else now
        self.worker._add_compiled(None)


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    made = Waiting(tmp_path, monkeypatch)
    yield made
    made.worker._context.destroy(linger=0)


def spec(text: str) -> GrammarSpec:
    found = text_grammar(None, regex=text, grammar=None, choice=None)
    assert found is not None
    return found


def test_grammars_of_requests_that_have_gone_are_not_compiled(waiting: Waiting) -> None:
    """a11: hostile ones, sent and left, are no work; known ones pass those that wait."""
    for id in range(1, 6):
        waiting.send(id, spec("a" * id))
    waiting.look()
    assert waiting.compiler.submitted == [spec("a")]
    for id in (1, 2, 3, 4):
        waiting.abort(id)
    waiting.look()
    assert waiting.compiler.submitted == [spec("a")], "one at a time"
    waiting.compiler.futures[spec("a")].set_result("grammar")
    waiting.send(6, spec("a"))
    waiting.look()
    assert waiting.added == [6]
    assert waiting.compiler.submitted == [spec("a"), spec("aaaaa")]
    waiting.compiler.futures[spec("aaaaa")].set_exception(ValueError("regex: is wrong"))
    waiting.look()
    assert waiting.said == [Refused(5, "regex: is wrong")]


def test_a_slow_grammar_is_its_own_fault_and_nobody_elses(waiting: Waiting) -> None:
    """a11: whoever waited behind it may send again, and is not told to change anything."""
    waiting.send(1, spec("a"))
    waiting.look(0.0)
    waiting.send(2, spec("b"))
    waiting.look(module.COMPILE_SECONDS - 0.1)
    assert waiting.said == []
    waiting.look(module.COMPILE_SECONDS + 0.1)
    (slow,) = waiting.said
    assert (slow.id, slow.busy) == (1, False)
    assert "make it simpler" in slow.error
    waiting.look(module.COMPILE_QUEUE_SECONDS + 1.0)
    assert [(item.id, item.busy) for item in waiting.said] == [(1, False), (2, True)]
    assert waiting.compiler.submitted == [spec("a")]
    assert waiting.added == []
