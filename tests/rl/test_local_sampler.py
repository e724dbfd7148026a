"""An engine as a sampler: the answers, what comes with new weights, and that trainer and sampler
agree to the bit."""

import asyncio
import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.inkling import Inkling
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Vocabulary, vocabulary_of
from suzuri.rl import local_sampler
from suzuri.rl.consistency import Agreement
from suzuri.rl.local_sampler import LocalSampler, OnPublish, PublicationError
from suzuri.rl.samples import samples_of
from suzuri.training.config import TrainingConfig
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Answer, Prompt, Sample, SampleParams, SamplerLost
from tests.model.models import random_model
from tests.rl.trajectories import Trajectory, Turn

NUDGED = "decoder.unembed.weight"
PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12], [200, 2, 7]]


@functools.cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(random_model("tiny").config.kept_vocabulary, Tokenizer().token_bytes)


def engine_of(model: Inkling) -> Engine:
    config = EngineConfig(
        max_context=200, max_running=8, global_pages=60, local_pages=60, snapshots=8, page_size=16
    )
    served = copy.deepcopy(model).requires_grad_(False)
    return Engine(served, config, memory_bytes=2**62, vocabulary=vocabulary())


@pytest.fixture(scope="module")
def model() -> Inkling:
    return random_model("tiny", torch.bfloat16)


def changed(model: Inkling, scale: float = 1.25) -> Inkling:
    """Other weights of the same shape."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.norm.weight.mul_(scale)
    return other


def draw(
    sampler: LocalSampler, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 12
) -> list[Answer]:
    async def run() -> list[Answer]:
        return await asyncio.gather(
            *(
                sampler.sample(Prompt(tokens=p), SampleParams(max_tokens=tokens, seed=i))
                for i, p in enumerate(prompts)
            )
        )

    return asyncio.run(run())


def expected(model: Inkling, prompt: Sequence[int], seed: int, tokens: int = 12) -> list[int]:
    """What an engine draws that does nothing else."""
    engine = engine_of(model)
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, detokenize=False)
    engine.add("0", prompt, params)
    return [event.token for event in engine.run() if event.token is not None]


def test_answers_are_those_of_an_engine_that_does_nothing_else(model: Inkling) -> None:
    sampler = LocalSampler(engine_of(model))
    for seed, (answer, prompt) in enumerate(zip(draw(sampler), PROMPTS, strict=True)):
        assert list(answer.tokens) == expected(model, prompt, seed)
        assert answer.finish in ("stop", "length") and answer.error is None
        assert len(answer.logprobs) == len(answer.tokens) == len(answer.versions)
        assert set(answer.versions) == {0}
        assert all(x <= 0 for x in answer.logprobs)


def test_a_prompt_that_cannot_run_is_its_callers_fault_alone(model: Inkling) -> None:
    sampler = LocalSampler(engine_of(model))

    async def run() -> list[Any]:
        params = SampleParams(max_tokens=4, seed=0)
        asked = [Prompt(tokens=[]), Prompt(tokens=[5]), Prompt(tokens=[5] * 400)]
        return await asyncio.gather(
            *(sampler.sample(prompt, params) for prompt in asked), return_exceptions=True
        )

    empty, fine, long = asyncio.run(run())
    assert "the prompt is empty" in str(empty)
    assert len(fine.tokens) == 4
    assert "the prompt has 400 tokens" in str(long)


def test_a_caller_that_goes_away_frees_what_it_held(model: Inkling) -> None:
    sampler = LocalSampler(engine_of(model))

    async def run() -> None:
        task = asyncio.ensure_future(
            sampler.sample(Prompt(tokens=[5]), SampleParams(max_tokens=150, seed=0))
        )
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    while sampler.engine.has_work:
        sampler.engine.step()
    sampler.engine.check()
    assert not sampler.engine.scheduler.running


def test_a_step_that_fails_ends_every_answer_that_waits_for_it(
    model: Inkling, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = LocalSampler(engine_of(model))
    left = iter([True, True])
    real = sampler.engine.step

    def step() -> Any:
        if next(left, None) is None:
            raise MemoryError("no room for a page")
        return real()

    monkeypatch.setattr(sampler.engine, "step", step)

    async def run() -> list[Any]:
        params = SampleParams(max_tokens=20, seed=0)
        asked = (sampler.sample(Prompt(tokens=prompt), params) for prompt in PROMPTS)
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, SamplerLost)
        assert str(error) == "a step of the engine failed (MemoryError: no room for a page)"


def test_new_weights_are_there_and_nothing_is_left_of_the_old_ones(model: Inkling) -> None:
    """R05, R07."""
    sampler, other = LocalSampler(engine_of(model)), changed(model)
    long = [list(range(1, 120))]
    before = draw(sampler, long)
    assert asyncio.run(sampler.publish(other)) == 1
    (after,) = draw(sampler, long)
    assert list(after.tokens) == expected(other, long[0], 0)
    assert list(after.logprobs) != list(before[0].logprobs)
    assert set(after.versions) == {1}
    assert sampler.version == 1


def test_a_publication_that_loses_something_is_refused(
    model: Inkling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R05: the transfer broken on purpose."""
    real = local_sampler.copy_weights

    def lossy(ours: dict[str, Any], sent: dict[str, Any]) -> None:
        sent = dict(sent)
        del sent["decoder.norm.weight"]
        real({name: ours[name] for name in sent}, sent)

    sampler = LocalSampler(engine_of(model))
    monkeypatch.setattr(local_sampler, "copy_weights", lossy)
    with pytest.raises(PublicationError, match="were sent"):
        asyncio.run(sampler.publish(changed(model)))
    with pytest.raises(PublicationError, match="the last publication of weights failed"):
        draw(sampler)


def test_weights_of_another_model_are_refused(model: Inkling) -> None:
    sampler = LocalSampler(engine_of(model))
    with pytest.raises(PublicationError, match=r"float32 .* was sent, the sampler has .*bfloat16"):
        asyncio.run(sampler.publish(random_model("tiny", torch.float32)))


@pytest.mark.parametrize("on_publish", ["finish", "continue", "restart"])
def test_answers_that_are_under_way(model: Inkling, on_publish: OnPublish) -> None:
    sampler, other = LocalSampler(engine_of(model), on_publish=on_publish), changed(model, 1.5)

    async def run() -> list[Answer]:
        asked = [
            asyncio.ensure_future(
                sampler.sample(Prompt(tokens=p), SampleParams(max_tokens=12, seed=i))
            )
            for i, p in enumerate(PROMPTS)
        ]
        for _ in range(7):
            await asyncio.sleep(0)
        await sampler.publish(other)
        return list(await asyncio.gather(*asked))

    for seed, (answer, prompt) in enumerate(zip(asyncio.run(run()), PROMPTS, strict=True)):
        tokens, versions = list(answer.tokens), list(answer.versions)
        if on_publish == "finish":
            assert set(versions) == {0}
            assert tokens == expected(model, prompt, seed)
        elif on_publish == "restart":
            assert set(versions) == {1}
            assert tokens == expected(other, prompt, seed)
        else:
            kept = versions.count(0)
            assert 0 < kept < len(tokens)
            assert versions == sorted(versions), "every token has the version that drew it"
            assert tokens[:kept] == expected(model, prompt, seed)[:kept]
            going_on = expected(other, [*prompt, *tokens[:kept]], seed, 12 - kept)
            assert tokens[kept:] == going_on


def samples_from(answers: Sequence[Answer]) -> list[Sample]:
    found: list[Sample] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        turn = Turn(prompt=Prompt(tokens=prompt), answer=answer)
        found += samples_of(Trajectory(turns=(turn,), reward=0.0, status="over"), 1.0)
    return found


def test_trainer_and_sampler_agree_to_the_bit_until_one_weight_moves(model: Inkling) -> None:
    """RL's divergence of sampler and trainer is 0; one ulp in one weight shows."""
    trainer = LocalTrainer(copy.deepcopy(model), TrainingConfig(), vocabulary())
    sampler = LocalSampler(engine_of(model))
    samples = samples_from(draw(sampler))

    def largest() -> float:
        agreement = Agreement()
        agreement.add(samples, trainer.forward(samples, "importance_sampling").logprobs)
        assert agreement.num_tokens == sum(int(s.inputs["weights"].sum()) for s in samples)
        return agreement.largest

    assert largest() == 0.0
    weight = trainer.model.get_parameter(NUDGED)
    with torch.no_grad():
        bits = weight.view(torch.int16)
        bits[0, 0] += 1
        weight.copy_(bits.view(torch.bfloat16))
    assert 0.0 < largest() < 1.0
