"""Outputs that follow a grammar: what is drawn is allowed, and nobody else notices."""

from collections.abc import Sequence as Many
from typing import Any

import pytest

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import preset
from suzuri.model.inkling import Inkling, randomize
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of


class Steps:
    """A grammar without a library: the row at place i is one of `allowed[i]`; then it is stuck."""

    def __init__(self, *allowed: Many[int]) -> None:
        self.allowed = allowed

    def matcher(self) -> "Walk":
        return Walk(self.allowed)


class Walk:
    where = "grammar"

    def __init__(self, allowed: Many[Many[int]]) -> None:
        self.allowed = allowed
        self.taken: list[int] = []

    def mask(self) -> bytes:
        if len(self.taken) == len(self.allowed):
            raise ValueError("the grammar cannot go on")
        bits = sum(1 << row for row in self.allowed[len(self.taken)])
        return bits.to_bytes(128, "little")

    def advance(self, row: int) -> None:
        assert row in self.allowed[len(self.taken)]
        self.taken.append(row)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(scope="module")
def model() -> Inkling:
    model = Inkling(preset("tiny"))
    randomize(model, 0)
    return model


def engine(model: Inkling, tokenizer: Tokenizer, **fields: Any) -> Engine:
    sizes: dict[str, Any] = {"max_running": 8, "page_size": 8, "max_context": 200}
    return Engine(
        model,
        EngineConfig(**{**sizes, "dtype": "float32", **fields}),
        memory_bytes=8 * 10**9,
        vocabulary=vocabulary_of(model.config.kept_vocabulary, tokenizer.token_bytes),
        token_bytes=tokenizer.token_bytes,
    )


def outputs(engine: Engine) -> tuple[dict[tuple[str, int], list[int]], dict[str, str | None]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[str, str | None] = {}
    while engine.has_work:
        for event in engine.step():
            id = event.sequence.request.id
            if event.token is not None:
                tokens.setdefault((id, event.sequence.index), []).append(event.token)
            if event.finish is not None:
                ends[id] = event.finish
        engine.check()
    return tokens, ends


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_rows_are_drawn_and_neighbours_stay_as_they_were(
    model: Inkling, tokenizer: Tokenizer, overlap: bool, temperature: float
) -> None:
    allowed = [[3], [40, 41, 42], list(range(100, 200)), [7, 9], [5], [6]]
    free = SamplingParams(max_tokens=12, seed=1, temperature=temperature, ignore_eos=True)
    bound = SamplingParams(max_tokens=6, seed=2, temperature=temperature, n=3, ignore_eos=True)
    alone = engine(model, tokenizer, overlap=overlap)
    alone.add("free", [1, 2, 3], free)
    expected, _ = outputs(alone)
    both = engine(model, tokenizer, overlap=overlap)
    both.add("free", [1, 2, 3], free)
    both.add("bound", [4, 5], bound, grammar=Steps(*allowed))
    found, ends = outputs(both)
    assert found["free", 0] == expected["free", 0]
    assert ends == {"free": "length", "bound": "length"}
    for index in range(3):
        rows = both.vocabulary.to_rows(found["bound", index])
        assert all(row in step for row, step in zip(rows, allowed, strict=True))


def test_masked_draws_are_those_of_a_bias(model: Inkling, tokenizer: Tokenizer) -> None:
    """A grammar that always allows the same rows draws what allowed_token_ids draws."""
    rows = [5, 17, 300, 301, 999]
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, temperature=1.3)
    one = engine(model, tokenizer)
    one.add("x", [1, 2], params, grammar=Steps(*[rows] * 20))
    other = engine(model, tokenizer)
    ids = other.vocabulary.to_ids(rows)
    other.add(
        "x",
        [1, 2],
        SamplingParams(
            max_tokens=20, seed=3, ignore_eos=True, temperature=1.3, allowed_token_ids=ids
        ),
    )
    assert outputs(one)[0] == outputs(other)[0]


def test_a_grammar_that_gets_stuck_ends_its_request_alone(
    model: Inkling, tokenizer: Tokenizer
) -> None:
    both = engine(model, tokenizer)
    both.add("free", [1, 2, 3], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    both.add("bound", [4, 5], SamplingParams(max_tokens=9, seed=1), grammar=Steps([3], [4]))
    _, ends = outputs(both)
    assert ends == {"free": "length", "bound": "error"}
    with pytest.raises(ValueError, match="cannot go on"):
        both.add("none", [1], SamplingParams(), grammar=Steps())


@pytest.mark.parametrize("pages", [14, 24])
def test_preempted_outputs_go_on_where_they_were(
    model: Inkling, tokenizer: Tokenizer, pages: int
) -> None:
    """With pages for two of five sequences, a grammar's state survives being preempted."""
    allowed = [[3 + i % 7, 40 + i] for i in range(60)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    roomy = engine(model, tokenizer)
    roomy.add("0", [1] * 20, params, grammar=Steps(*allowed))
    expected, _ = outputs(roomy)
    tight = engine(
        model, tokenizer, global_pages=pages, local_pages=60, snapshots=4, max_context=96
    )
    for index in range(5):
        tight.add(str(index), [1] * 20, params, grammar=Steps(*allowed), salt=index)
    found, _ = outputs(tight)
    assert tight.scheduler.counters.preemptions > 0
    assert [found[str(index), 0] for index in range(5)] == [expected["0", 0]] * 5
