"""Tasks answered and graded: what a perfect model would get, what chance gets, and the report."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from suzuri.engine.llm import LLM
from suzuri.envs.generators.kinds import KINDS
from suzuri.envs.mixture import Mixture
from suzuri.envs.task import Task
from suzuri.evals.config import EvalConfig
from suzuri.evals.draft_length import accepted_lengths
from suzuri.evals.exchange import Exchange
from suzuri.evals.report import Line, Report, show, summary
from suzuri.evals.run import evaluate, run_eval
from suzuri.model.batch import pack
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.tokenizer import Tokenizer
from tests.model.models import random_model

TEXT = [name for name in KINDS if name not in ("pictures", "sounds")]


def turns_of(task: Task, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each of the target's assistant turns, as a perfect model would write them."""
    renderer = ChatRenderer(tokenizer)
    found: list[list[int]] = []
    known = list(task.messages)
    options: dict[str, Any] = {"tools": list(task.tools) or None, "effort": task.effort}
    for message in task.target:
        before = renderer.render(known, **options).token_ids
        known.append(message)
        if message["role"] == "assistant":
            after = renderer.render(known, add_generation_prompt=False, **options).token_ids
            assert after[: len(before)] == before
            found.append(after[len(before) :])
    return found


@pytest.mark.parametrize("kind", TEXT)
def test_a_perfect_model_scores_one(kind: str) -> None:
    tokenizer = Tokenizer()
    mixture = Mixture(weights={kind: 1.0}, seed=3, split="held_out")
    for place in range(6):
        exchange = Exchange(mixture.task(place), seed=0)
        for ids in turns_of(exchange.task, tokenizer):
            assert not exchange.is_over
            exchange.take(ids, "stop", tokenizer.token_bytes)
        assert exchange.is_over
        assert exchange.score() == 1.0, (exchange.task.target, exchange.turns)


def test_an_answer_that_was_cut_off_ends_the_exchange() -> None:
    tokenizer = Tokenizer()
    task = Mixture(weights={"tools": 1.0}, seed=1).task(0)
    exchange = Exchange(task, seed=0)
    ids = turns_of(task, tokenizer)[0][:-3]
    exchange.take(ids, "length", tokenizer.token_bytes)
    assert exchange.is_over
    assert exchange.is_truncated
    assert exchange.score() == 0.0


def test_chance_answers_everything_and_is_reported() -> None:
    llm = LLM("inkling-nano", random_weights=True, dtype="float32", max_running=8)
    config = EvalConfig(count=2, max_tokens=12, samples=2, temperature=1.0)
    names = ("arithmetic", "tools", "strings/reverse_word", "pictures", "sounds")
    report = evaluate(llm, names, config, Console(quiet=True))
    assert [line.name for line in report.lines] == list(names)
    assert all(line.count == 2 and len(line.transcripts) == 4 for line in report.lines)
    assert all(0 <= line.score <= 0.5 for line in report.lines)
    again = evaluate(llm, names[:1], config, Console(quiet=True))
    assert again.lines[0] == report.lines[0], "the same seeds, the same answers"
    assert "base64" not in json.dumps([line.transcripts for line in report.lines])
    assert report.tokens == sum(2 * 2 * line.mean_tokens for line in report.lines)


def test_scores_and_standard_errors() -> None:
    task = Mixture(weights={"arithmetic": 1.0}).task(0)
    group = [Exchange(task, seed=i) for i in range(4)]
    for one, right in zip(group, (True, False, True, True), strict=True):
        one.turns = [dict(task.target[0])] if right else [{"role": "assistant", "content": "?"}]
        one.is_over = True
    line = Line.of("arithmetic", group, 2)
    # Two tasks with means 0.5 and 1: spread 0.3536 over sqrt(2).
    assert line.score == 0.75
    assert line.error == pytest.approx(0.25)
    report = Report(
        model="m", settings={}, lines=[line], seconds=2.0, tokens=100, accepted_length=1.5
    )
    assert summary(report) == (
        "1 kinds, mean score 75.0 %, 100 tokens in 2.0 s (50/s), 1.50 draft tokens accepted on "
        "average"
    )
    console = Console(record=True, width=120, file=io.StringIO())
    show(report, console, wrong=1)
    text = console.export_text()
    assert "75.0 %" in text
    assert "said   ['?']" in text


def test_accepted_lengths_are_those_of_drafting_one_by_one() -> None:
    model = random_model("tiny", torch.float32).requires_grad_(False)
    assert model.draft is not None
    generator = random.Random(5)
    rows = [generator.randrange(900) for _ in range(14)]
    decoder = model.decoder

    def guesses(place: int) -> list[int]:
        """What the depths say behind the token at `place`, each fed with what came."""
        with torch.no_grad():
            previous_ND = decoder(pack([rows[: place + 1]]))
            found: list[int] = []
            for depth in range(len(model.draft.depths)):  # pyright: ignore[reportOptionalMemberAccess]
                read = rows[depth + 1 : place + depth + 2]
                embedded_ND = decoder.embedded(pack([rows[: place + depth + 2]]))[depth + 1 :]
                batch = pack([[0] * len(read)])
                previous_ND = model.draft(depth, previous_ND, embedded_ND, batch)  # pyright: ignore[reportOptionalCall]
                found.append(int(decoder.logits(previous_ND)[-1].argmax()))
            return found

    start = 6
    # Make some guesses right: write what the depths say into the sequence, from the front.
    for place in range(start - 1, 9):
        rows[place + 2] = guesses(place)[0]
        if place % 2:
            rows[place + 3] = guesses(place)[1]
    wanted: list[int] = []
    depths = len(model.draft.depths)
    for place in range(start - 1, len(rows) - depths - 1):
        length = 0
        for depth, guess in enumerate(guesses(place)):
            if guess != rows[place + depth + 2]:
                break
            length += 1
        wanted.append(length)
    found = accepted_lengths(model, rows, start)
    assert found == wanted
    assert max(found) >= 1
    assert accepted_lengths(model, rows[:9], start) == wanted[: 9 - depths - start]
    assert accepted_lengths(model, rows[:6], start) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "--count 0"),
        ({"difficulty": (0.5, 0.2)}, "--difficulty 0.5 0.2"),
        ({"samples": 2}, "gives the same answer each time"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"at_least": 2.0}, "--at-least 2"),
        ({"drafts": True, "random_weights": True}, "needs trained weights"),
    ],
)
def test_bad_flags_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(**fields).resolve()


def test_unknown_kinds_are_named() -> None:
    llm = LLM("inkling-nano", random_weights=True, dtype="float32", max_running=2, max_context=512)
    with pytest.raises(ValueError, match="no kind 'poems'"):
        evaluate(llm, ("poems",), EvalConfig(count=1), Console(quiet=True))


def test_what_cannot_be_run_is_named_before_a_model_is_read(tmp_path: Path) -> None:
    """Not after minutes of answers."""
    for config, message in (
        (EvalConfig(model="no/such", tasks=("json", "jsn")), "--tasks jsn: .*there are arithmetic"),
        (EvalConfig(model="no/such", tasks=("json/pers",)), "--tasks json/pers: .* person"),
    ):
        with pytest.raises(ValueError, match=message):
            run_eval(config.resolve())
    for out in (tmp_path / "absent" / "x.json", tmp_path):
        with pytest.raises(ValueError, match=r"--out .*no file can be written there"):
            EvalConfig(out=str(out)).resolve()
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="--seed "):
            EvalConfig(seed=seed).resolve()
    EvalConfig(out=str(tmp_path / "x.json")).resolve()
