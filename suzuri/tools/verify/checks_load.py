"""Checks under pressure: preemption, aborts, random interleavings, and sampling beside others."""

import random
from typing import Any

from suzuri.engine.request import Request, Sequence, Status
from suzuri.tools.verify.lab import Lab, Mismatch, NotTested, Serving

Result = tuple[list[int], list[float | None]]
"""Tokens of a sequence, and raw log-probs of those it drew."""


def preemption(lab: Lab, page: int) -> None:
    """A pool too small for what runs: the preempted are computed again, from hits and without."""
    for shares in (True, False):
        half = lab.long // 2
        context = lab.long + 2 * page
        pools = lab.tight(page, context, spare=2, windows=3, snapshots=8)
        serving = lab.serving(
            page=page, context=context, max_running=5, max_chunk=11, prefix_cache=shares, **pools
        )
        for i in range(4):
            serving.add(lab.ids(half + i, i), max_tokens=half - 2, seed=i, priority=i % 2)
            serving.step()
        serving.run()
        if not serving.counters.preemptions:
            raise NotTested("nothing was preempted")
        serving.compare()


def aborts(lab: Lab, page: int) -> None:
    """Neighbours end while they wait, prefill and decode; new ones get their pages at once."""
    context = lab.long + 24
    serving = lab.serving(
        page=page,
        context=context,
        max_running=4,
        token_budget=24,
        max_chunk=10,
        **lab.tight(page, context, spare=context // page, windows=4, snapshots=6),
    )
    stay = [serving.add(lab.ids(lab.long // 2, 1), max_tokens=24, seed=1)]
    ended: set[str] = set()
    for turn in range(12):
        length = (lab.long, 3 + turn, lab.long // 2)[turn % 3]
        serving.add(lab.ids(length, 100 + turn), max_tokens=24)
        if turn % 4 == 0:
            stay.append(serving.add(lab.ids(7 + turn, 200 + turn), max_tokens=12, seed=turn))
        for _ in range(1 + turn % 3):
            serving.step()
        wanted = ("decode", "prefill", "waiting")[turn % 3]
        victims = [
            r for r in serving.requests if r not in stay and _phase(r.sequences[0]) == wanted
        ]
        if victims:
            ended.add(wanted)
            serving.engine.abort(victims[0].id)
            serving.engine.check()
    for request in serving.requests:
        if request not in stay:
            serving.engine.abort(request.id)
    serving.run()
    if ended != {"waiting", "prefill", "decode"}:
        raise NotTested(f"aborted only while {', '.join(sorted(ended))}")
    for request in stay:
        if request.sequences[0].finish != "length":
            raise NotTested(f"{request.id} was to stay")
    serving.compare()


def _phase(sequence: Sequence) -> str:
    if sequence.status is not Status.RUNNING:
        return "finished" if sequence.status is Status.FINISHED else "waiting"
    if sequence.is_prefilling:
        return "prefill"
    return "decode" if len(sequence.tokens) > sequence.num_prompt else "first"


def interleavings(lab: Lab, page: int, seeds: int) -> None:
    """Random arrivals, aborts, priorities, stops and samples over tiny pools, many times."""
    totals = {"preemptions": 0, "hits": 0, "aborts": 0, "evictions": 0}
    # What chance did not bring about gets as many tries again, and again.
    for seed in range(4 * seeds):
        if seed >= seeds and all(totals.values()):
            break
        for name, count in _interleaving(lab, page, seed).items():
            totals[name] += count
    missing = [name for name, count in totals.items() if not count]
    if missing:
        raise NotTested(f"no {', no '.join(missing)} in {4 * seeds} runs")


def _interleaving(lab: Lab, page: int, seed: int) -> dict[str, int]:
    chance = random.Random(lab.config.seed * 1000 + seed * 10 + page)
    context = lab.long + 20
    budget = chance.choice((9, 16, 40))
    serving = lab.serving(
        page=page,
        context=context,
        max_running=chance.choice((3, 5, 8)),
        token_budget=budget,
        max_chunk=chance.choice((1, 3, page, budget)),
        overlap=chance.random() < 0.7,
        resume_stride=chance.choice((0, 0, 7)),
        aging=chance.choice((1, 8)),
        **lab.tight(page, context, spare=chance.randrange(4), windows=2, snapshots=3),
    )
    trunks = [lab.ids(lab.long, 300 + i) for i in range(2)]
    num_aborted = 0
    for _ in range(14):
        serving.add(**_arrival(lab, chance, trunks, serving))
        for _ in range(chance.choice((0, 1, 3))):
            serving.step()
        if chance.random() < 0.3:
            living = [
                r
                for r in serving.requests
                if any(s.status is not Status.FINISHED for s in r.sequences)
            ]
            if living:
                num_aborted += serving.engine.abort(chance.choice(living).id)
    serving.run()
    serving.compare()
    stats = serving.engine.cache.stats
    return {
        "preemptions": serving.counters.preemptions,
        "hits": stats.hits,
        "aborts": num_aborted,
        "evictions": stats.evictions.total(),
    }


def _arrival(
    lab: Lab, chance: random.Random, trunks: list[list[int]], serving: Serving
) -> dict[str, Any]:
    """A prompt that begins like earlier ones, as often as not, or goes on from an answer."""
    cut = chance.randrange(1, lab.long)
    prompt = chance.choice(trunks)[:cut] + lab.ids(chance.randrange(4), chance.randrange(4))
    done = [r for r in serving.requests if r.sequences[0].status is Status.FINISHED]
    if done and chance.random() < 0.3:
        prompt = chance.choice(done).sequences[0].tokens[: lab.long] + lab.ids(2, 5)
    return {
        "prompt": prompt,
        "max_tokens": chance.randrange(1, 17),
        "seed": chance.randrange(3),
        "temperature": chance.choice((0.0, 0.7, 1.0)),
        "priority": chance.randrange(3),
        "n": chance.choice((1, 1, 1, 2)),
        "stop_token_ids": [chance.randrange(lab.vocabulary) for _ in range(1)],
    }


def overlapped(lab: Lab, page: int) -> None:
    """Planning one step ahead changes nothing: the same ids and log-probs as without."""
    results: list[list[Result]] = []
    for overlap in (True, False):
        context = lab.long + 16
        serving = lab.serving(
            page=page, context=context, token_budget=16, overlap=overlap, max_running=4
        )
        for i in range(6):
            prompt = lab.ids(lab.long // (1 + i % 3), i % 4)
            serving.add(prompt, max_tokens=6 + i, seed=i, temperature=i % 2)
            serving.step()
        serving.run()
        serving.compare()
        results.append([_result(serving, request) for request in serving.requests])
    if results[0] != results[1]:
        raise Mismatch("ids or log-probs differ between overlap on and off")


def prompt_logprobs(lab: Lab, page: int) -> None:
    """A finished sequence as a prompt: its log-probs are those it was decoded with."""
    serving = lab.serving(page=page, context=2 * lab.long, max_chunk=7)
    first = serving.serve(lab.ids(lab.long // 2), max_tokens=lab.long // 2 + page % 5)
    tokens, decoded = _result(serving, first)
    again = [serving.add(tokens, prompt_logprobs=1, max_tokens=2, seed=i) for i in range(2)]
    serving.add(lab.ids(9, 1), max_tokens=9)
    serving.run()
    for request in again:
        records = request.prompt_logprobs or []
        scored = [record.raw for record in records]
        if scored[len(first.prompt) - 1 :] != decoded:
            raise Mismatch(f"prompt log-probs of {request.id} are not those of the decoded tokens")
    serving.compare()


def sampling(lab: Lab, page: int) -> None:
    """Every feature of sampling, alone and in a batch that is preempted: ids and log-probs."""
    some = list(dict.fromkeys(lab.ids(max(lab.vocabulary // 3, 8), 400)))
    # Few ids far above the others: each draw moves the next one to another of them.
    favour = {"logit_bias": {id: 40.0 - i / 2 for i, id in enumerate(some[:3])}}
    # The last to come are the first to be preempted: those whose counts must survive it.
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.2, "top_k": 5, "min_p": 0.01},
        {"logit_bias": {some[0]: 6.0, some[-1]: 5.0}},
        {"seed": -1},
        {"allowed_token_ids": some},
        {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 1.0, **favour},
        {"temperature": 0.0, "repetition_penalty": 1.5, **favour},
    ]
    num_new, base = 14, lab.before_page(page) - len(kinds) + 1
    prompts = [lab.ids(base + i, 410 + i) for i in range(len(kinds))]
    context = lab.long + 20
    alone: list[Result] = []
    for prompt, kind in zip(prompts, kinds, strict=True):
        serving = lab.serving(page=page, context=context, overlap=False, prefix_cache=False)
        request = serving.serve(prompt, max_tokens=num_new, **kind)
        serving.compare()
        alone.append(_result(serving, request))
    serving = _preempted_late(lab, page, prompts, kinds, num_new)
    serving.compare()
    for request, kind, result in zip(serving.requests, kinds, alone, strict=True):
        if _result(serving, request) != result:
            raise Mismatch(f"other ids or log-probs than alone with {kind}")


def _preempted_late(
    lab: Lab, page: int, prompts: list[list[int]], kinds: list[dict[str, Any]], num_new: int
) -> Serving:
    """Serves all together in a pool that has room for the prompts and a part of the answers.

    What is admitted depends on head room too, so sizes are tried until one with penalties was
    preempted behind its first token.
    """
    context, growth = lab.long + 20, len(prompts) * num_new // page + 8
    prompt_pages = sum(-(-len(prompt) // page) for prompt in prompts)
    least = lab.tight(page, context, snapshots=6)
    for extra in sorted(range(0, growth, 2), key=lambda extra: abs(extra - growth // 2)):
        pools = {name: max(prompt_pages + extra, count) for name, count in least.items()}
        serving = lab.serving(page=page, context=context, max_running=len(prompts), **pools)
        for prompt, kind in zip(prompts, kinds, strict=True):
            serving.add(prompt, max_tokens=num_new, **kind)
            serving.step()
        serving.run()
        again = [s for r in serving.requests for s in r.sequences if s.recomputed > s.num_prompt]
        if any(s.request.sampling.params.has_penalties for s in again):
            return serving
    raise NotTested("nothing with penalties was preempted behind its first token")


def _result(serving: Serving, request: Request) -> Result:
    """Of the first sample."""
    sequence = request.sequences[0]
    events = [event for event in serving.events.get(sequence, []) if event.logprobs is not None]
    return sequence.tokens, [event.logprobs.raw for event in events if event.logprobs]
