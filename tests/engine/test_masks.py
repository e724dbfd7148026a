"""The work for masks in one step is bounded, and what it costs others too (a11)."""

import pytest

from suzuri.engine.engine import Engine
from suzuri.engine.masks import FREE_SECONDS, REQUEST_SECONDS, STEP_SECONDS, Masks
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import preset
from suzuri.model.inkling import Inkling, randomize
from suzuri.processing.errors import GrammarError
from suzuri.processing.tokenizer import Tokenizer
from tests.engine.test_masked import engine, outputs

FIRST = 10
"""The row that all of these grammars allow, and nothing else."""


class Clock:
    """Of processor time; grammars move it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly:
    """A grammar whose masks take `seconds`; `most` rows, then it is stuck."""

    where = "grammar"

    def __init__(self, clock: Clock, seconds: float, most: int = 1000) -> None:
        self.clock, self.seconds, self.most = clock, seconds, most
        self.num_rows = 0

    def matcher(self) -> "Costly":
        return Costly(self.clock, self.seconds, self.most)

    def mask(self) -> bytes:
        self.clock.now += self.seconds
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


@pytest.mark.parametrize("overlap", [True, False])
def test_usual_masks_are_never_counted(model: Inkling, tokenizer: Tokenizer, overlap: bool) -> None:
    clock = Clock()
    made = timed(engine(model, tokenizer, overlap=overlap, max_running=64), clock)
    made.add("x", [1], SamplingParams(max_tokens=4, n=64), grammar=Costly(clock, FREE_SECONDS))
    assert outputs(made)[1] == {"x": "length"}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_whose_masks_take_too_much_ends(
    model: Inkling, tokenizer: Tokenizer, overlap: bool
) -> None:
    """Each of its masks could be paid for, but not all of them."""
    clock = Clock()
    made = timed(engine(model, tokenizer, overlap=overlap), clock)
    costly = Costly(clock, FREE_SECONDS + REQUEST_SECONDS / 3)
    bad = made.add("bad", [1], SamplingParams(max_tokens=9, n=8), grammar=costly)
    made.add("one", [1], SamplingParams(max_tokens=9), grammar=costly)
    made.add("free", [1], SamplingParams(max_tokens=9, ignore_eos=True))
    assert outputs(made)[1] == {"bad": "error", "one": "length", "free": "length"}
    assert all(sequence.at_fault for sequence in bad.sequences)
    assert "grammar: its outputs together take too much work" in str(bad.sequences[0].error)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_does_so_much_and_no_more(
    model: Inkling, tokenizer: Tokenizer, overlap: bool
) -> None:
    """What is left comes in later steps; cheap ones and those without a form do not wait."""
    clock = Clock()
    made = timed(engine(model, tokenizer, overlap=overlap), clock)
    seconds = FREE_SECONDS + STEP_SECONDS * 0.8
    bound = [str(index) for index in range(5)]
    made.add("cheap", [1], SamplingParams(max_tokens=6), grammar=Costly(clock, 0.0))
    for id in bound:
        made.add(id, [1], SamplingParams(max_tokens=6), grammar=Costly(clock, seconds))
    ends: dict[str, str] = {}
    while made.has_work:
        began = clock.now
        for event in made.step():
            if event.finish is not None:
                ends[event.sequence.request.id] = event.finish
        assert clock.now - began <= 2 * seconds + 1e-9
        made.check()
    assert next(iter(ends)) == "cheap"
    assert ends == dict.fromkeys([*bound, "cheap"], "length")


def test_only_grammars_are_the_fault_of_a_request(model: Inkling, tokenizer: Tokenizer) -> None:
    clock = Clock()
    made = timed(engine(model, tokenizer), clock)
    stuck = made.add("x", [1], SamplingParams(max_tokens=9), grammar=Costly(clock, 0.0, most=2))
    assert outputs(made)[1] == {"x": "error"}
    (sequence,) = stuck.sequences
    assert sequence.at_fault
    assert sequence.error == "grammar: the output cannot go on"
    assert len(sequence.tokens) == 3
