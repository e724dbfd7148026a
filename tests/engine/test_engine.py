"""The engine over tokens (simulated.py): whatever the pools, the order and the cache do, every
request gets what it would get alone. Lines C03, C04, C06, K01, K03, K04, K05, K08."""

import random
from typing import Any

import pytest

from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from tests.engine.simulated import TokenRunner, alone, collect, config, engine, outputs

Requests = list[tuple[str, list[int], SamplingParams]]


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"seed": 1, **fields})


def ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(5000) for _ in range(count)]


def mixed(count: int, seed: int = 0, longest: int = 60) -> Requests:
    generator = random.Random(seed)
    shared = ids(generator, longest)
    requests: Requests = []
    for i in range(count):
        own = ids(generator, generator.randrange(1, longest))
        prompt = shared[: generator.randrange(longest)] + own if generator.random() < 0.5 else own
        requests.append((str(i), prompt, params(generator.randrange(1, 40), seed=i)))
    return requests


def runner(subject: Engine) -> TokenRunner:
    found: Any = subject.runner
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no overlap": {"overlap": False},
    "no cache": {"prefix_cache": False},
    "small chunks": {"max_chunk": 3},
    "tiny budget": {"token_budget": 8},
    "tiny pools": {"global_pages": 66, "local_pages": 30, "snapshots": 2},
    "page of one": {"page_size": 1, "global_pages": 300, "local_pages": 200},
    "large pages": {"page_size": 128, "global_pages": 20, "local_pages": 20},
    "stride": {"resume_stride": 5, "snapshots": 60},
    "undo": {"undo": 5},
    "one at a time": {"max_running": 1, "token_budget": 4},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_output_equals_the_request_alone(name: str) -> None:
    requests = mixed(40)
    subject = engine(**CONFIGS[name])
    found = outputs(subject, requests)
    for id, prompt, wanted in requests:
        assert found[id, 0] == alone(prompt, wanted), id
    assert subject.scheduler.counters.finished == 40


@pytest.mark.parametrize("window", [None, 1, 2, 200])
@pytest.mark.parametrize("taps", [2, 5])
def test_other_windows_and_taps(window: int | None, taps: int) -> None:
    shape = config(window, taps)
    requests = mixed(12, seed=5)
    found = outputs(engine(shape, max_context=128, local_pages=300), requests)
    for id, prompt, wanted in requests:
        single = engine(shape, prefix_cache=False, max_context=128, local_pages=300)
        assert found[id, 0] == outputs(single, [("x", prompt, wanted)])["x", 0]


def test_c03_three_tails_of_one_prefix_hit() -> None:
    generator = random.Random(1)
    prefix = ids(generator, 41)
    subject = engine()
    for tail in range(4):
        prompt = prefix + ids(generator, 9)
        found = outputs(subject, [(str(tail), prompt, params())])
        assert found[str(tail), 0] == alone(prompt, params())
    # The first leaves nothing at the divergence, the second learns it, the others hit.
    assert subject.cache.stats.hits == 2
    assert subject.scheduler.counters.cached_tokens == 2 * 41


def test_identical_prompts_recompute_one_row() -> None:
    prompt = ids(random.Random(2), 50)
    subject = engine(token_budget=64)
    at_once = outputs(subject, [(str(i), prompt, params(seed=i)) for i in range(4)])
    for i in range(4):
        assert at_once[str(i), 0] == alone(prompt, params(seed=i))
    counters = subject.scheduler.counters
    assert counters.cached_tokens == 3 * 49
    later = outputs(subject, [("later", prompt, params())])
    assert later["later", 0] == alone(prompt, params()) and counters.cached_tokens == 4 * 49


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_prompt_share_its_prefill(prefix_cache: bool) -> None:
    prompt = ids(random.Random(3), 37)
    subject = engine(prefix_cache=prefix_cache)
    found = outputs(subject, [("a", prompt, params(n=5))])
    assert len({tuple(tokens) for tokens in found.values()}) == 5
    assert subject.scheduler.counters.cached_tokens == 4 * 36
    again = outputs(engine(), [("b", prompt, params(n=5))])
    assert list(found.values()) == list(again.values())
    if not prefix_cache:
        assert subject.cache.points == 0


def test_c06_preemption_keeps_every_kind_of_state() -> None:
    generator = random.Random(4)
    requests: Requests = [(str(i), ids(generator, 60), params(50, seed=i)) for i in range(4)]
    subject = engine(global_pages=66, local_pages=40, snapshots=2)
    found = outputs(subject, requests)
    assert subject.scheduler.counters.preemptions > 0
    for id, prompt, wanted in requests:
        assert found[id, 0] == alone(prompt, wanted)


def test_k01_a_preempted_request_comes_back_before_later_ones() -> None:
    generator = random.Random(5)
    subject = engine(global_pages=66, local_pages=40, max_running=3)
    subject.add("long", ids(generator, 100), params(120))
    order: list[str] = []
    count = 0
    while subject.has_work:
        if count < 60 and subject.scheduler.num_waiting < 2:
            subject.add(f"short {count}", ids(generator, 30), params(10))
            count += 1
        order += [e.sequence.request.id for e in subject.step() if e.finish]
        subject.check()
    assert order.index("long") < 40


def test_k03_little_work_is_thrown_away() -> None:
    generator = random.Random(6)
    subject = engine(global_pages=66, local_pages=60, max_running=6)
    subject.add("long", ids(generator, 120), params(100))
    requests: Requests = [(str(i), ids(generator, 30), params(20)) for i in range(40)]
    outputs(subject, requests)
    counters = subject.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens / counters.computed_tokens < 0.3


def test_k05_prompts_never_hold_up_a_stream() -> None:
    generator = random.Random(7)
    subject = engine(global_pages=3000, local_pages=3000, max_context=2000, max_running=16)
    subject.add("stream", ids(generator, 4), params(200))
    for _ in range(3):
        subject.step()
    for i in range(20):
        subject.add(str(i), ids(generator, 600), params(2))
    gaps, since, ended = [0], 0, 0
    while subject.has_work:
        events = subject.step()
        since += 1
        ended += sum(e.finish is not None for e in events)
        if any(e.sequence.request.id == "stream" for e in events):
            gaps.append(since)
            since = 0
        if gaps[-1] and len(gaps) > 200:
            break
    assert max(gaps) <= 2
    while subject.has_work:
        ended += sum(e.finish is not None for e in subject.step())
    assert ended == 21


def test_a_short_prompt_gets_past_a_long_one() -> None:
    generator = random.Random(8)
    subject = engine(global_pages=3000, local_pages=3000, max_context=8000)
    subject.add("long", ids(generator, 6000), params(1))
    subject.step()
    subject.add("short", ids(generator, 10), params(1))
    steps = 0
    while not any(e.sequence.request.id == "short" for e in subject.step()):
        steps += 1
    assert steps <= 3


def test_a_low_priority_waits_but_not_for_ever() -> None:
    generator = random.Random(9)
    subject = engine(max_running=1, token_budget=64, aging=8)
    subject.add("low", ids(generator, 5), params(2), priority=3)
    seen: list[str] = []
    for i in range(60):
        subject.add(str(i), ids(generator, 5), params(2))
        for _ in range(2):
            seen += [e.sequence.request.id for e in subject.step() if e.finish]
    assert "low" in seen
    assert seen.index("low") > 3


def test_k04_continues_by_itself_after_a_preemption() -> None:
    generator = random.Random(10)
    subject = engine(global_pages=66, local_pages=40)
    requests: Requests = [(str(i), ids(generator, 90), params(100, seed=i)) for i in range(3)]
    found = outputs(subject, requests)  # ends only when all have ended
    assert {len(tokens) for tokens in found.values()} == {100}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["plain", "tiny pools", "no overlap", "no cache"])
def test_k08_random_workload_leaks_nothing(seed: int, name: str) -> None:
    """Hundreds of requests with arrivals, aborts, deadlines and priorities."""
    generator = random.Random(seed)
    clock = [0.0]
    subject = engine(**CONFIGS[name])
    subject._clock = lambda: clock[0]
    shared = [ids(generator, 80) for _ in range(4)]
    live: dict[str, tuple[list[int], SamplingParams]] = {}
    found: dict[tuple[str, int], list[int]] = {}
    finishes: dict[tuple[str, int], str] = {}
    added = 0
    while added < 250 or subject.has_work:
        clock[0] += 1.0
        if added < 250 and generator.random() < 0.5:
            base = generator.choice(shared)[: generator.randrange(80)]
            prompt = base + ids(generator, generator.randrange(1, 30))
            wanted = params(
                generator.randrange(1, 30), seed=added, n=generator.choice([1, 1, 1, 3])
            )
            deadline = generator.choice([None, None, None, 5.0, 50.0])
            subject.add(
                str(added), prompt, wanted, priority=generator.randrange(3), deadline=deadline
            )
            live[str(added)] = (prompt, wanted)
            added += 1
        if live and generator.random() < 0.08:
            subject.abort(generator.choice(list(live)))
        events = subject.step()
        collect(events, found)
        for event in events:
            if event.finish:
                finishes[event.sequence.request.id, event.sequence.index] = event.finish
        if generator.random() < 0.2:
            subject.check()
    subject.check()
    for pool in subject.scheduler.pools.values():
        assert pool.used == pool.spare
    subject.cache.clear()
    for pool in subject.scheduler.pools.values():
        assert pool.used == 0 and pool.free == pool.size - 1
    assert not subject._requests
    for (id, index), finish in finishes.items():
        prompt, wanted = live[id]
        whole = alone(prompt, wanted, index)
        tokens = found[id, index]
        assert tokens == (whole if finish == "length" else whole[: len(tokens)]), (id, finish)
    assert set(finishes.values()) == {"length", "abort", "deadline"}
    assert len(finishes) == sum(wanted.n for _, wanted in live.values())


def test_agents_hit_most_of_what_they_share() -> None:
    """10 conversations x 8 turns; each turn appends the answer and a tool's result."""
    generator = random.Random(11)
    subject = engine(
        global_pages=4000,
        local_pages=900,
        snapshots=80,
        max_context=8000,
        token_budget=256,
        page_size=16,
        max_running=4,
    )
    histories = [ids(generator, 300) for _ in range(10)]
    known = [0] * 10
    shared, cached = 0, 0
    for turn in range(8):
        for who in range(10):
            before = subject.scheduler.counters.cached_tokens
            request = (f"{who}.{turn}", histories[who], params(40, seed=who))
            answer = outputs(subject, [request])[f"{who}.{turn}", 0]
            if turn:
                shared += known[who]
                cached += subject.scheduler.counters.cached_tokens - before
            known[who] = len(histories[who]) + len(answer) - 1  # the newest token was never run
            histories[who] = [
                *histories[who],
                *answer,
                *ids(generator, generator.randrange(20, 200)),
            ]
    assert cached / shared > 0.8
    assert subject.cache.stats.evictions.total() > 0


@pytest.mark.parametrize("fault", ["copy on write", "restore"])
def test_a_broken_runner_is_seen(fault: str) -> None:
    subject = engine()
    runner(subject).faults.add(fault)
    prompt = ids(random.Random(12), 41)
    wanted = params(20)
    requests: Requests = [(str(i), [*prompt, i, i + 1], wanted) for i in range(4)]
    first = outputs(subject, requests[:1])
    assert first["0", 0] == alone(requests[0][1], wanted)
    outputs(subject, requests[1:2])
    found = outputs(subject, requests[2:])
    assert any(found[id, 0] != alone(prompt, wanted) for id, prompt, wanted in requests[2:])


# Bad input harms the request alone.


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 5000], {}, "outside this model's vocabulary of 5000"),
        ([1, -1], {}, "not token ids"),
        ([1, 2.5], {}, "2.5 is not an integer"),
        ([1, True], {}, "True is not an integer"),
        ([1] * 256, {}, "256 tokens; with at least one token of answer at most 255"),
        ([1] * 250, {"max_tokens": 7}, "more than max_context = 256; lower max_tokens to 6"),
    ],
)
def test_a_bad_request_is_refused_alone(
    prompt: list[Any], fields: dict[str, Any], message: str
) -> None:
    subject = engine()
    subject.add("good", [1, 2, 3], params())
    subject.step()
    with pytest.raises(ValueError, match=message):
        subject.add("bad", prompt, params(**fields))
    found = outputs(subject, [])
    assert found["good", 0][-7:] == alone([1, 2, 3], params())[-7:]
    subject.add("bad", [4], params())  # the id is free


def test_ids_priorities_and_deadlines_are_checked() -> None:
    subject = engine()
    subject.add("a", [1], params())
    with pytest.raises(ValueError, match="'a' is in use"):
        subject.add("a", [1], params())
    for wrong in (5, ["x"], None):
        id: Any = wrong
        with pytest.raises(ValueError, match="must be a string"):
            subject.add(id, [1], params())
    salt: Any = [1]
    with pytest.raises(ValueError, match=r"salt = \[1\]: must be hashable"):
        subject.add("salted", [1], params(), salt=salt)
    with pytest.raises(ValueError, match="must be a string that is not empty"):
        subject.add("", [1], params())
    with pytest.raises(ValueError, match=r"priority = 1\.5"):
        subject.add("b", [1], params(), priority=1.5)  # pyright: ignore[reportArgumentType]
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="deadline"):
            subject.add("b", [1], params(), deadline=wrong)
    with pytest.raises(ValueError, match="at most 2 may"):
        full = engine(max_waiting=2)
        for i in range(4):
            full.add(str(i), [1], params())


def test_max_tokens_none_goes_to_the_end_of_the_context() -> None:
    subject = engine(max_context=40)
    found = outputs(subject, [("a", [1, 2, 3], SamplingParams(max_tokens=None, seed=1))])
    assert len(found["a", 0]) == 37


def test_abort_of_the_unknown_and_twice() -> None:
    subject = engine()
    subject.add("a", [1, 2], params())
    assert subject.abort("a") and not subject.abort("a") and not subject.abort("b")
    events = subject.run()
    assert [(e.token, e.finish) for e in events] == [(None, "abort")]


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_a_prompt_whose_last_chunk_is_one_token_leaves_its_point(chunk: int) -> None:
    prompt = ids(random.Random(13), 21)
    subject = engine(max_chunk=chunk)
    outputs(subject, [("a", prompt, params())])
    outputs(subject, [("b", [*prompt, *range(6)], params())])
    assert subject.scheduler.counters.cached_tokens == 21
    outputs(subject, [("c", prompt, params())])
    assert subject.scheduler.counters.cached_tokens == 41


def test_c18_local_state_stops_growing_after_the_window() -> None:
    subject = engine(max_context=5000, global_pages=1300, local_pages=40, max_running=2)
    subject.add("a", ids(random.Random(14), 40), params(4000))
    used: list[int] = []
    while subject.has_work:
        subject.step()
        used.append(subject.scheduler.pools["local"].used)
    # A window of 7, one token to undo and the newest, at the worst place of pages of 4; beside it
    # the pages of the point at the end of the prompt.
    assert max(used[20:]) <= 4 + 3
    assert max(used[:20]) <= 10 + 3
    assert len(used) > 4000


def test_c18_local_pages_of_a_chunk_come_back_in_the_next_step() -> None:
    """Not only when the next page is needed: until then others would find none."""
    subject = engine(max_chunk=32, local_pages=200, prefix_cache=False, token_budget=64)
    window = (7 + 1) // 4 + 2  # what a sequence needs between steps, as capacity.py counts it
    request = subject.add("a", ids(random.Random(15), 90), params(30))
    pool = subject.scheduler.pools["local"]
    used: list[tuple[int, int]] = []
    while subject.has_work:
        subject.step()
        used.append((request.sequences[0].computed, pool.used))
        subject.check()
    assert max(pages for computed, pages in used if computed <= 90) <= window + 32 // 4
    assert max(pages for computed, pages in used if 91 < computed < 119) <= window


def test_many_prefills_at_once_stay_within_their_windows_and_one_budget() -> None:
    """The sum that capacity.py makes for local pages: a window for each that runs, and what one
    step has in flight."""
    budget, running, size = 64, 8, 16
    subject = engine(
        local_pages=300, global_pages=300, page_size=size, prefix_cache=False, token_budget=budget
    )
    generator = random.Random(16)
    for i in range(30):
        subject.add(str(i), ids(generator, generator.randrange(40, 150)), params(12))
    window = (7 + 1) // size + 2
    most = 0
    while subject.has_work:
        subject.step()
        most = max(most, subject.scheduler.pools["local"].used)
    assert running * window // 2 < most <= running * window + budget // size
