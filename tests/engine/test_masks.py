"""The work for masks in one step is bounded, and what it costs others too (a11)."""

import itertools
import threading

import pytest

from suzuri.engine.engine import Engine
from suzuri.engine.masks import DEAR_SECONDS, STEP_SECONDS, Masks
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import preset
from suzuri.model.inkling import Inkling, randomize
from suzuri.processing.errors import GrammarError
from suzuri.processing.tokenizer import Tokenizer
from tests.engine.test_masked import engine, outputs
from tests.waiting import PATIENCE, until

FIRST = 10
"""The row that all of these grammars allow, and nothing else."""


class Clock(threading.local):
    """Of processor time, for each thread its own; grammars move it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly:
    """A grammar whose masks take `seconds`, each or one after the other; `most` rows, then it is
    stuck."""

    where = "grammar"

    def __init__(self, clock: Clock, seconds: float | list[float], most: int = 1000) -> None:
        self.clock, self.seconds, self.most = clock, seconds, most
        self.num_rows = 0

    def matcher(self) -> "Costly":
        return Costly(self.clock, self.seconds, self.most)

    def mask(self) -> bytes:
        costs = self.seconds
        cost = costs[self.num_rows] if isinstance(costs, list) else costs
        self.clock.now += cost
        if self.num_rows == self.most:
            raise GrammarError("grammar: the output cannot go on")
        return (1 << FIRST).to_bytes(128, "little")

    def advance(self, row: int) -> None:
        assert row == FIRST
        self.num_rows += 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(scope="module")
def model() -> Inkling:
    model = Inkling(preset("tiny"))
    randomize(model, 0)
    return model


def timed(made: Engine, clock: Clock) -> Engine:
    made._masks = Masks(clock)
    return made


def ends(made: Engine, steps: int = 10**6) -> dict[str, str]:
    """What ended, in its order, in so many steps."""
    found: dict[str, str] = {}
    while made.has_work and steps:
        steps -= 1
        for event in made.step():
            if event.finish is not None:
                found[event.sequence.request.id] = event.finish
        made.check()
    return found


class Held:
    """A grammar whose masks, but for the first, come when they may."""

    where = "grammar"

    def __init__(self, gate: threading.Event, begun: list[str], name: str = "") -> None:
        self.gate, self.begun, self.name = gate, begun, name
        self.num_rows = 0

    def matcher(self) -> "Held":
        return Held(self.gate, self.begun, self.name)

    def mask(self) -> bytes:
        if self.num_rows:
            self.begun.append(self.name)
            assert self.gate.wait(PATIENCE)
        return (1 << FIRST).to_bytes(128, "little")

    def advance(self, row: int) -> None:
        assert row == FIRST
        self.num_rows += 1


@pytest.mark.parametrize("overlap", [True, False])
def test_nobody_waits_for_a_dear_mask(model: Inkling, tokenizer: Tokenizer, overlap: bool) -> None:
    """Whatever it takes: one that never comes holds up its own request alone, and no other one is
    begun meanwhile."""
    gate, begun = threading.Event(), list[str]()
    made = engine(model, tokenizer, overlap=overlap)
    for index in range(5):
        made.add(str(index), [1], SamplingParams(max_tokens=3), grammar=Held(gate, begun))
    made.add("free", [1], SamplingParams(max_tokens=9, ignore_eos=True))
    assert ends(made, steps=12) == {"free": "length"}
    until(lambda: begun)
    assert len(begun) == 1
    gate.set()
    assert ends(made) == dict.fromkeys("01234", "length")


@pytest.mark.parametrize("overlap", [True, False])
def test_many_of_one_request_do_not_hold_up_another(
    model: Inkling, tokenizer: Tokenizer, overlap: bool
) -> None:
    gate, begun = threading.Event(), list[str]()
    made = engine(model, tokenizer, overlap=overlap)
    made._masks = Masks(itertools.count().__next__)  # all are dear: those of the thread, in turns
    for name, n in (("many", 7), ("one", 1)):
        params = SamplingParams(max_tokens=2, n=n)
        made.add(name, [1], params, grammar=Held(gate, begun, name))
    assert not ends(made, steps=6)
    gate.set()
    assert ends(made) == {"many": "length", "one": "length"}
    assert begun.index("one") <= 1
    assert len(begun) == 8


def test_what_ends_while_its_mask_is_computed(model: Inkling, tokenizer: Tokenizer) -> None:
    gate, begun = threading.Event(), list[str]()
    made = engine(model, tokenizer)
    made.add("gone", [1], SamplingParams(max_tokens=9), grammar=Held(gate, begun))
    assert not ends(made, steps=6)
    assert made.abort("gone")
    made.add("next", [1], SamplingParams(max_tokens=9, ignore_eos=True))
    assert ends(made, steps=20)["next"] == "length"
    gate.set()
    made.add("last", [1], SamplingParams(max_tokens=3), grammar=Held(gate, begun))
    assert ends(made) == {"last": "length"}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_computes_so_many_cheap_masks_and_no_more(
    model: Inkling, tokenizer: Tokenizer, overlap: bool
) -> None:
    """Counted on the clock that masks move: of those that a step computes itself."""
    clock = Clock()
    made = timed(engine(model, tokenizer, overlap=overlap), clock)
    cost = DEAR_SECONDS * 0.9
    many = made.add("many", [1], SamplingParams(max_tokens=9, n=8), grammar=Costly(clock, cost))
    many.has_dear_masks = False  # else the thread takes as many of the first ones as it gets to
    most = 0.0
    while made.has_work:
        began = clock.now
        made.step()
        most = max(most, clock.now - began)
    assert STEP_SECONDS < most <= STEP_SECONDS + cost + 1e-9


def test_a_request_is_dear_from_its_first_dear_mask_on(
    model: Inkling, tokenizer: Tokenizer
) -> None:
    clock = Clock()
    made = timed(engine(model, tokenizer), clock)
    made.add("usual", [1], SamplingParams(max_tokens=6), grammar=Costly(clock, DEAR_SECONDS / 2))
    costs = [0.0, 0.0, 2 * DEAR_SECONDS, 0.0, 0.0, 0.0]
    dear = made.add("dear", [1], SamplingParams(max_tokens=6), grammar=Costly(clock, costs))
    usual = made._requests["usual"]
    assert usual.has_dear_masks  # not known yet
    assert ends(made) == {"usual": "length", "dear": "length"}
    assert not usual.has_dear_masks
    assert dear.has_dear_masks


def test_only_grammars_are_the_fault_of_a_request(model: Inkling, tokenizer: Tokenizer) -> None:
    clock = Clock()
    made = timed(engine(model, tokenizer), clock)
    stuck = made.add("x", [1], SamplingParams(max_tokens=9), grammar=Costly(clock, 0.0, most=2))
    assert outputs(made)[1] == {"x": "error"}
    (sequence,) = stuck.sequences
    assert sequence.at_fault
    assert sequence.error == "grammar: the output cannot go on"
    assert len(sequence.tokens) == 3
