"""Agents on a real model: what they repeat is found again, in full bits, in the memory planned.

10 conversations of 8 turns, tool results of 200-2000 tokens, pools that are too small for all of
it. Shared tokens are counted by benchmarks/agent_pattern.py from the prompts and answers alone.
c03, c04, k03: hits restore every kind of state, are counted, and change no answer.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.agent_pattern import Pattern, Turn, common_prefix, kept, play, rate
from suzuri.engine.capacity import capacity, state_bytes
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenLogprobs
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import ModelConfig, MtpConfig, preset
from suzuri.model.inkling import Inkling, randomize
from suzuri.model.random_weights import initialize
from suzuri.model.sizes import Layout, Sizes
from suzuri.model.sizes_workspace import sampling_tables
from suzuri.processing.vocabulary import FullVocabulary

ROWS = 1000
PAGE = 16
CHECKED_EVERY = 25
"""Steps between two looks at all invariants: each takes milliseconds."""


def narrow() -> ModelConfig:
    """`tiny` with one layer of each kind: local dense, local with experts, global with experts."""
    tiny = preset("tiny")
    text = dataclasses.replace(
        tiny.text,
        model_max_length=1 << 17,
        num_hidden_layers=3,
        local_layer_ids=(0, 1),
        dense_mlp_idx=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
    )
    return dataclasses.replace(
        tiny,
        text=text,
        vision=None,
        audio=None,
        kept_vocabulary=None,
        eos_token_id=None,
        mtp=MtpConfig(),
    )


@functools.cache
def model() -> Inkling:
    built = Inkling(narrow(), dtype=torch.float32, parts=frozenset())
    randomize(built, 0)
    return built.requires_grad_(False)


def engine(**fields: Any) -> Engine:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": PAGE,
        "max_running": 6,
        "token_budget": 512,
        "max_context": 16384,
    }
    config = EngineConfig(**{**settings, **fields})
    return Engine(model(), config, memory_bytes=1, vocabulary=FullVocabulary())


def alone(turn: Turn) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The same request on an engine of its own: no prefix cache, other pages and chunks."""
    subject = engine(
        prefix_cache=False,
        max_running=1,
        page_size=64,
        token_budget=2048,
        global_pages=300,
        local_pages=80,
        snapshots=2,
    )
    subject.add("alone", turn.prompt, turn.params)
    events = [event for event in subject.run() if event.token is not None]
    return [event.token for event in events if event.token is not None], [
        event.logprobs for event in events
    ]


def assert_equal_alone(turns: list[Turn]) -> None:
    for turn in turns:
        tokens, logprobs = alone(turn)
        where = f"conversation {turn.conversation}, turn {turn.number}"
        assert turn.tokens == tokens, where
        assert turn.logprobs == logprobs, where
        assert all(entry is not None and entry.raw is not None for entry in logprobs)


# Memory


def tensors(held: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object, models left out."""
    if id(held) in seen or isinstance(held, nn.Module | str | bytes | int | float):
        return
    seen.add(id(held))
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        for item in held.values():
            yield from tensors(item, seen)
    elif isinstance(held, list | tuple | set):
        for item in held:
            yield from tensors(item, seen)
    else:
        names = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*getattr(held, "__dict__", {}), *names):
            yield from tensors(getattr(held, name, None), seen)


def held_bytes(subject: Engine) -> int:
    """Of all tensors behind an engine, views counted once."""
    weights = {p.untyped_storage().data_ptr() for p in subject.model.parameters()}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors(subject, set())
    }
    return sum(size for place, size in storages.items() if place not in weights)


def used_bytes(subject: Engine) -> int:
    """Of the pages, slots and snapshots that somebody holds or that are page 0 of their pool."""
    planned = state_bytes(subject.model.config, subject.config, subject.capacity)
    pools = subject.scheduler.pools
    used = {
        "global pages": (pools["global"].used + 1) / pools["global"].size,
        "local pages": (pools["local"].used + 1) / pools["local"].size,
        "conv slots": (len(subject.scheduler.running) + 1) / subject.capacity.slots,
        "resume points": (pools["snapshot"].used + 1) / pools["snapshot"].size,
        "tables": 1.0,
    }
    return round(sum(planned[name] * share for name, share in used.items()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("local", ["both", "all global", "all local"])
def test_an_engine_holds_the_planned_bytes(dtype: str, by_hand: bool, local: str) -> None:
    shape = narrow()
    layers = {"both": (0, 1), "all global": (), "all local": (0, 1, 2)}[local]
    text = dataclasses.replace(shape.text, local_layer_ids=layers, sconv_kernel_size=3)
    if local == "all global":
        text = dataclasses.replace(text, sliding_window_size=None)
    shape = dataclasses.replace(shape, text=text)
    built = Inkling(shape, dtype=getattr(torch, dtype), parts=frozenset())
    initialize(built, 0)
    sizes: dict[str, Any] = {"global_pages": 90, "local_pages": 31, "snapshots": 7}
    config = EngineConfig(
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        page_size=8,
        max_running=3,
        token_budget=64,
        max_context=500,
        undo=2,
        **(sizes if by_hand else {}),
    )
    memory = 2 * 10**9
    subject = Engine(built, config, memory_bytes=memory, vocabulary=FullVocabulary())
    planned = state_bytes(shape, config, subject.capacity)
    assert held_bytes(subject) == sum(planned.values())
    assert (planned["global pages"] == 0) == (local == "all local")
    assert (planned["local pages"] == 0) == (local == "all global")
    if not by_hand:
        # Beside weights and workspace all of it is inside what was given.
        assert sum(planned.values()) < memory


def test_sampling_tables_stay_within_the_plan_under_preemption() -> None:
    """As many rows as sequences run, whoever is preempted."""
    running, count = 3, 12
    subject = engine(
        max_running=running,
        max_context=160,
        token_budget=32,
        global_pages=14,
        local_pages=12,
        snapshots=2,
    )
    params = SamplingParams(
        max_tokens=60,
        seed=1,
        ignore_eos=True,
        detokenize=False,
        repetition_penalty=1.2,
        logit_bias={7: 1.0},
    )
    generator = random.Random(4)
    for i in range(count):
        prompt = [generator.randrange(ROWS) for _ in range(60)]
        subject.add(str(i), prompt, params, priority=i % 2)
    found = [0] * count
    while subject.has_work:
        for event in subject.step():
            assert event.finish != "error", event.sequence.error
            found[int(event.sequence.request.id)] += event.token is not None
        subject.check()
    assert found == [60] * count
    assert subject.scheduler.counters.preemptions > 0
    planned = state_bytes(subject.model.config, subject.config, subject.capacity)
    tables = sampling_tables(subject.model.config, running)
    assert 0 < held_bytes(subject) - sum(planned.values()) <= tables


def test_pools_sized_by_memory_take_what_the_model_leaves() -> None:
    """A byte less than the smallest memory is refused; page 0 and the tables count as well."""
    config = EngineConfig(
        dtype="float32", page_size=PAGE, max_running=4, token_budget=128, max_context=16_000
    )
    shape = narrow()

    def pages(memory: int) -> int:
        try:
            return capacity(shape, config, memory).global_pages
        except ValueError:
            return 0

    low, high = 1, 10**11
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pages(middle) else (middle + 1, high)
    assert pages(low) == 16_000 // PAGE + 3 and pages(low - 1) == 0
    found = capacity(shape, config, low)
    layout = Layout(token_budget=128, platform="cpu")
    sizes = Sizes(shape, layout, low)
    beside = sum(
        line.num_bytes * (1 if line.group == "reserve" else 2)
        for line in sizes.lines(1, 4)
        if line.group != "state"
    )
    total = beside + sum(state_bytes(shape, config, found).values())
    assert low - 2 <= total <= low  # the reserve is a share of the memory, rounded down


# The pattern


class Watch:
    """Looks at an engine after each step."""

    def __init__(self, subject: Engine) -> None:
        self.subject, self.steps, self.most = subject, 0, 0
        self.planned = sum(
            state_bytes(subject.model.config, subject.config, subject.capacity).values()
        )

    def __call__(self) -> None:
        self.most = max(self.most, used_bytes(self.subject))
        self.steps += 1
        if self.steps % CHECKED_EVERY == 0:
            self.subject.check()


def evicting(**pools: int) -> tuple[Engine, Watch]:
    subject = engine(**pools)
    return subject, Watch(subject)


def assert_memory_as_planned(subject: Engine, watch: Watch) -> None:
    assert held_bytes(subject) == watch.planned
    assert watch.planned / 2 < watch.most <= watch.planned


PARAMS: dict[str, Any] = {"logprobs": 2, "sampled_logprobs": True, "top_p": 0.9}


def test_ten_conversations_hit_what_they_share_while_pools_evict() -> None:
    pattern = Pattern(
        vocabulary=ROWS,
        instructions=300,
        task=(20, 60),
        answer=(8, 30),
        pause=(0, 6),
        skew=3,
        seed=3,
    )
    subject, watch = evicting(global_pages=3000, local_pages=90, snapshots=30)
    turns = play(subject, pattern, watch, **PARAMS)
    subject.check()
    assert len(turns) == 80
    lengths = [len(turn.prompt) for turn in turns]
    assert max(lengths) > 7000
    evictions = subject.cache.stats.evictions
    assert evictions.total() > 100 and min(evictions.values()) > 0 and len(evictions) == 3
    # No turn of a conversation waits for another's: they really are interleaved.
    order = [turn.conversation for turn in turns]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 60
    later = [turn for turn in turns if turn.number > 0]
    assert all(turn.cached < len(turn.prompt) and turn.cached <= turn.shared for turn in turns)
    assert rate(later) > 0.8
    for number in range(1, 8):
        assert rate([turn for turn in turns if turn.number == number]) > 0.8, number
    # The engine's own counters say the same.
    counters = subject.scheduler.counters
    assert counters.preemptions == 0
    assert counters.cached_tokens == sum(turn.cached for turn in turns)
    assert counters.prompt_tokens == sum(lengths)
    assert_memory_as_planned(subject, watch)
    sample = random.Random(0).sample([turn for turn in later if len(turn.prompt) < 4000], 4)
    assert_equal_alone([*sample, max(later, key=lambda turn: len(turn.prompt))])


def test_thoughts_that_clients_drop_cost_little() -> None:
    """The next prompt leaves the way of the answer inside it, and goes on from there."""
    pattern = Pattern(
        vocabulary=ROWS,
        instructions=300,
        task=(20, 60),
        result=(200, 600),
        answer=(32, 56),
        pause=(0, 6),
        dropped=True,
        live=4,
        seed=5,
    )
    subject, watch = evicting(global_pages=1100, local_pages=90, snapshots=30, min_branch_gain=8)
    turns = play(subject, pattern, watch, **PARAMS)
    subject.check()
    before = {(turn.conversation, turn.number): turn for turn in turns}
    for turn in turns:
        if turn.number > 0:
            last = before[turn.conversation, turn.number - 1]
            # Inside the last answer, whatever else was asked.
            inside = turn.shared - len(last.prompt)
            assert len(last.tokens) // 4 <= inside < len(last.tokens)
    evictions = subject.cache.stats.evictions
    assert evictions.total() > 100 and min(evictions.values()) > 0 and len(evictions) == 3
    for number in range(1, 8):
        assert rate([turn for turn in turns if turn.number == number]) > 0.8, number
    assert_memory_as_planned(subject, watch)
    later = [turn for turn in turns if turn.number > 0]
    assert_equal_alone(random.Random(1).sample(later, 4))


def identical(seed: int) -> Turn:
    generator = random.Random(8)
    return Turn(
        conversation=0,
        number=seed,
        prompt=[generator.randrange(ROWS) for _ in range(2500)],
        params=SamplingParams(max_tokens=12, seed=seed, logprobs=2, ignore_eos=True),
        shared=2500,
    )


@functools.cache
def alone_of_identical(seed: int) -> tuple[list[int], list[TokenLogprobs | None]]:
    return alone(identical(seed))


@pytest.mark.parametrize("at_once", [False, True])
def test_an_identical_prompt_of_2500_tokens_four_times(at_once: bool) -> None:
    subject = engine(global_pages=1100, local_pages=60, snapshots=9)
    requests = []
    found: dict[str, list[tuple[int | None, TokenLogprobs | None]]] = {}
    for i in range(4):
        requests.append(subject.add(str(i), identical(i).prompt, identical(i).params))
        if at_once and i < 3:
            continue
        for event in subject.run():
            found.setdefault(event.sequence.request.id, []).append((event.token, event.logprobs))
    subject.check()
    cached = [request.sequences[0].num_cached for request in requests]
    assert cached == [0, 2499, 2499, 2499]
    assert subject.scheduler.counters.computed_tokens == 2500 + 3 + 4 * 11
    for i in range(4):
        assert found[str(i)] == list(zip(*alone_of_identical(i), strict=True))
    assert len({tuple(token for token, _ in events) for events in found.values()}) == 4


def test_common_prefixes_are_counted_token_by_token() -> None:
    generator = random.Random(0)
    for _ in range(300):
        one = [generator.randrange(2) for _ in range(generator.randrange(12))]
        other = one[: generator.randrange(12)] + [generator.randrange(2) for _ in range(3)]
        plain = 0
        while plain < min(len(one), len(other)) and one[plain] == other[plain]:
            plain += 1
        assert common_prefix(one, other) == common_prefix(other, one) == plain
    assert kept(list(range(8)), True) == [0, 1, 6, 7]
    assert kept([5], True) == [5] and kept([5, 6], False) == [5, 6]
