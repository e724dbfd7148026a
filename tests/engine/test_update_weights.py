"""New weights while requests run: nothing of them is lost, and nothing of the old weights stays."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenEvent
from suzuri.engine.request import Media
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.inkling import Inkling
from suzuri.processing.grammar import GrammarCompiler
from suzuri.processing.grammar_request import text_grammar
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Vocabulary, vocabulary_of
from tests.model.models import random_model

LONG = list(range(1, 70))


@functools.cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(random_model("tiny").config.kept_vocabulary, Tokenizer().token_bytes)


def engine_of(model: Inkling, *, overlap: bool = True) -> Engine:
    config = EngineConfig(
        max_context=200,
        max_running=4,
        page_size=16,
        token_budget=32,
        overlap=overlap,
        global_pages=60,
        local_pages=60,
        snapshots=8,
    )
    return Engine(
        copy.deepcopy(model).requires_grad_(False),
        config,
        memory_bytes=2**62,
        vocabulary=vocabulary(),
        token_bytes=Tokenizer().token_bytes,
    )


@pytest.fixture(scope="module")
def model() -> Inkling:
    return random_model("tiny", torch.bfloat16)


def picture(model: Inkling, index: int) -> Media:
    vision = model.config.vision
    assert vision is not None
    shape = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3)
    inputs = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return Media(
        index=index, count=3, kind="image", digest=b"picture!", inputs=inputs, keeps_inputs=True
    )


def fill(engine: Engine) -> None:
    """With requests that keep every kind of state, more than run at one time."""
    fields: dict[str, Any] = {"max_tokens": 14, "sampled_logprobs": True, "logprobs": 2}
    engine.add("plain", LONG, SamplingParams(seed=1, **fields))
    engine.add(
        "many",
        [5, 6, 7],
        SamplingParams(
            n=3, seed=2, top_p=0.9, presence_penalty=1.0, repetition_penalty=1.2, **fields
        ),
    )
    engine.add("prompt", LONG[:50], SamplingParams(seed=3, prompt_logprobs=1, **fields))
    engine.add("stops", [9, 8], SamplingParams(seed=4, stop=["e", "a", "t"], **fields))
    compiler = GrammarCompiler(engine.vocabulary, Tokenizer().token_bytes)
    spec = text_grammar(None, regex="[a-f]{4,40}", grammar=None, choice=None)
    assert spec is not None
    grammar = compiler.submit(spec).result()
    engine.add("bound", [70, 71], SamplingParams(seed=5, **fields), grammar=grammar)
    image = engine.model.config.image_token_id
    seen = [5, image, image, image, 6]
    media = [picture(engine.model, 1)]
    engine.add("seen", seen, SamplingParams(seed=6, **fields), media=media)


Found = dict[tuple[str, int], list[tuple[Any, ...]]]


def collected(events: list[TokenEvent]) -> Found:
    found: Found = {}
    for event in events:
        sequence = event.sequence
        key = (sequence.request.id, sequence.index)
        found.setdefault(key, []).append((event.token, event.text, event.logprobs, event.finish))
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9, 16])
def test_the_same_weights_again_change_nothing_whatever_a_request_asks(
    model: Inkling, steps: int, overlap: bool
) -> None:
    alone, subject = engine_of(model), engine_of(model, overlap=overlap)
    fill(alone)
    fill(subject)
    prompts = [subject._requests["prompt"], alone._requests["prompt"]]
    expected = collected(alone.run())
    events: list[TokenEvent] = []
    for _ in range(steps):
        events += subject.step()
    before = len(events)
    assert subject.update_weights(lambda: None) == 1
    subject.check()
    while subject.has_work:
        events += subject.step()
        subject.check()
    assert collected(events) == expected
    assert prompts[0].prompt_logprobs == prompts[1].prompt_logprobs
    assert len(prompts[0].prompt_logprobs or ()) == 49
    versions = [event.version for event in events]
    assert versions == sorted(versions) and versions[-1] == 1
    assert set(versions[:before]) <= {0}


def drawn(events: list[TokenEvent]) -> list[tuple[int, float | None]]:
    return [
        (event.token, event.logprobs.sampled)
        for event in events
        if event.token is not None and event.logprobs is not None
    ]


def test_pictures_are_looked_at_anew_by_a_tower_with_new_weights(model: Inkling) -> None:
    image = model.config.image_token_id
    prompt = [5, image, image, image, 6]

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, seed=6, sampled_logprobs=True, ignore_eos=True)

    subject = engine_of(model)
    subject.add("seen", prompt, params(20), media=[picture(model, 1)])
    events: list[TokenEvent] = []
    while len(events) < 4:
        events += subject.step()

    def change(served: Inkling) -> None:
        assert served.vision is not None
        with torch.no_grad():
            for weight in served.vision.parameters():
                weight.mul_(1.5)

    subject.update_weights(lambda: change(subject.model))
    events += subject.run()
    kept = [event.token for event in events if event.token is not None and event.version == 0]
    found = drawn(events)
    assert 4 <= len(kept) < len(found) == 20

    other = copy.deepcopy(model)
    change(other)
    fresh, stale = engine_of(other), engine_of(model)
    for engine in (fresh, stale):
        left = params(20 - len(kept))
        engine.add("seen", [*prompt, *kept], left, media=[picture(model, 1)])
    assert found[len(kept) :] == drawn(fresh.run())
    assert found[len(kept) :] != drawn(stale.run())


def test_log_probs_of_a_prompt_that_was_half_read_are_all_of_the_new_weights(
    model: Inkling,
) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.norm.weight.mul_(1.5)
    params = SamplingParams(max_tokens=2, seed=3, prompt_logprobs=1)
    subject, fresh = engine_of(model), engine_of(other)
    request = subject.add("prompt", LONG, params)
    alone = fresh.add("prompt", LONG, params)
    fresh.run()
    while not request.prompt_logprobs:
        subject.step()
    assert len(request.prompt_logprobs) < len(LONG) - 1, "one chunk of three"

    def change() -> None:
        with torch.no_grad():
            subject.model.decoder.norm.weight.mul_(1.5)

    subject.update_weights(change)
    subject.run()
    assert request.prompt_logprobs == alone.prompt_logprobs
