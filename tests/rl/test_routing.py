"""Which experts an answer went through: asked for, carried into samples, replayed by a trainer."""

import asyncio
import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from suzuri.engine.engine import Engine
from suzuri.envs.env import Trajectory
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.samples import samples_of
from suzuri.training.config import TrainingConfig
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Answer, Array, Prompt, Sample, SampleParams
from tests.engine.routing import engine_of, whole
from tests.model.models import random_model
from tests.rl.trajectories import Turn, attempt, turn

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def model() -> Inkling:
    found = random_model("tiny", torch.bfloat16)
    found.config = dataclasses.replace(found.config, eos_token_id=None)
    return found


def engine(model: Inkling) -> Engine:
    return engine_of(copy.deepcopy(model).requires_grad_(False), "bfloat16")


def rerouted(model: Inkling) -> Inkling:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("router.weight"):
                weight.copy_(weight.flip(0))
    return other


async def ask(sampler: LocalSampler, prompt: Sequence[int], routing: bool = True) -> Answer:
    params = SampleParams(max_tokens=12, seed=3, routing=routing)
    return await sampler.sample(Prompt(tokens=prompt), params)


def routing_of(answer: Answer) -> Array:
    assert answer.routing is not None
    return answer.routing


def sample_of(*turns: tuple[Sequence[int], Answer]) -> Sample:
    played = [Turn(prompt=Prompt(tokens=prompt), answer=answer) for prompt, answer in turns]
    (sample,) = samples_of(Trajectory(turns=played, reward=0.0, status="over"), 1.0)
    return sample


def test_an_answer_says_so_when_it_is_asked(model: Inkling) -> None:
    sampler = LocalSampler(engine(model))

    async def both() -> list[Answer]:
        return await asyncio.gather(*(ask(sampler, PROMPT, routing) for routing in (True, False)))

    asked, other = asyncio.run(both())
    assert list(asked.tokens) == list(other.tokens)
    assert other.routing is None
    tokens = [*PROMPT, *asked.tokens]
    assert np.array_equal(routing_of(asked), whole(model, tokens[:-1]).experts_TLK)
    sample = sample_of((PROMPT, asked))
    assert sample.routing is not None and sample.routing_mask is None
    assert sample.routing.shape[0] == sample.num_tokens
    assert sample_of((PROMPT, other)).routing is None


def test_replay_of_what_todays_weights_drew_changes_no_bit(model: Inkling) -> None:
    sampler = LocalSampler(engine(model))
    sample = sample_of((PROMPT, asyncio.run(ask(sampler, PROMPT))))
    trainer = LocalTrainer(copy.deepcopy(model), TrainingConfig(), FullVocabulary())
    (logprobs,) = trainer.forward([sample], "importance_sampling").logprobs
    is_drawn = sample.inputs["weights"] != 0
    assert np.array_equal(logprobs[is_drawn], sample.inputs["logprobs"][is_drawn])


@pytest.mark.parametrize("on_publish", ["continue", "restart"])
def test_answers_under_way_when_new_weights_come(model: Inkling, on_publish: str) -> None:
    """Each token keeps the experts of the weights that drew the one after it."""
    new = rerouted(model)
    sampler = LocalSampler(engine(model), on_publish=on_publish)  # pyright: ignore[reportArgumentType]

    async def run() -> Answer:
        asked = asyncio.ensure_future(ask(sampler, PROMPT))
        for _ in range(7):
            await asyncio.sleep(0)
        await sampler.publish(new)
        return await asked

    answer = asyncio.run(run())
    tokens = [*PROMPT, *answer.tokens][:-1]
    kept = list(answer.versions).count(0)
    cut = len(PROMPT) + kept - 1 if kept else 0
    assert 0 < kept < len(answer.tokens) if on_publish == "continue" else kept == 0
    before, after = (whole(one, tokens).experts_TLK for one in (model, new))
    assert (before[:cut] != after[:cut]).any() or not kept
    assert np.array_equal(routing_of(answer), np.concatenate([before[:cut], after[cut:]]))


def test_turns_of_a_conversation(model: Inkling) -> None:
    """The second turn's prompt was read under other weights than the first turn was drawn with:
    its tokens keep what was recorded when they first ran."""
    sampler, new = LocalSampler(engine(model)), rerouted(model)
    first = asyncio.run(ask(sampler, PROMPT))
    asyncio.run(sampler.publish(new))
    prompt = [*PROMPT, *first.tokens, 20, 21]
    second = asyncio.run(ask(sampler, prompt))
    sample = sample_of((PROMPT, first), (prompt, second))
    cut = len(PROMPT) + len(first.tokens) - 1
    tokens = [*prompt, *second.tokens][:-1]
    assert list(sample.tokens) == tokens
    assert sample.routing is not None and sample.routing_mask is None
    assert np.array_equal(sample.routing[:cut], whole(model, tokens[:cut]).experts_TLK)
    assert np.array_equal(sample.routing[cut:], whole(new, tokens).experts_TLK[cut:])
    assert (sample.routing[:cut] != whole(new, tokens).experts_TLK[:cut]).any()


def recorded(turn_: Turn, count: int, value: int) -> Turn:
    """The turn with a record of `count` tokens, all of one value."""
    routing = np.full((count, 4, 2), value, np.uint8)
    answer = turn_.answer
    return Turn(
        prompt=turn_.prompt,
        answer=Answer(
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish=answer.finish,
            routing=routing,
        ),
    )


def test_what_nobody_recorded_is_marked() -> None:
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6, 7])
    (sample,) = samples_of(attempt(1.0, first, recorded(second, 6, 9)), 1.0)
    assert sample.routing is not None and sample.routing_mask is not None
    assert sample.routing_mask.tolist() == [False] * 3 + [True] * 3
    assert (sample.routing[3:] == 9).all()
    (sample,) = samples_of(attempt(1.0, recorded(first, 3, 8), second), 1.0)
    assert sample.routing_mask is not None
    assert sample.routing_mask.tolist() == [True] * 3 + [False] * 3
    (sample,) = samples_of(attempt(1.0, recorded(first, 2, 8), recorded(second, 5, 9)), 1.0)
    assert sample.routing is not None and sample.routing_mask is not None
    assert sample.routing_mask.tolist() == [True, True, False, True, True, False]
    assert sample.routing[:, 0, 0].tolist() == [8, 8, 0, 9, 9, 0]


def test_a_record_of_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="routing of 4 tokens for 3"):
        samples_of(attempt(1.0, recorded(turn([1, 2], [3, 4]), 4, 8)), 1.0)
