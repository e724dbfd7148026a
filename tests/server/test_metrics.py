"""Metrics: vLLM's names, and values that are those of a scripted load under a clock that stands."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from suzuri.engine.messages import Event, Stats, Waits
from suzuri.engine.stream import EngineUnavailable
from suzuri.server.service import Service
from tests.server.asking import CHAT, COMPLETIONS, chat, run
from tests.server.fakes import FakeEngine, service
from tests.waiting import until_async

NAMES = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc",
    "counter": "num_preemptions prompt_tokens prompt_tokens_cached generation_tokens "
    "prefix_cache_queries prefix_cache_hits request_success",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "request_inference_time_seconds iteration_tokens_total request_prompt_tokens "
    "request_generation_tokens request_params_n request_params_max_tokens",
}


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sheet:
    """What /metrics says."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            self.kinds[family.name.removeprefix("suzuri:")] = family.type
            for sample in family.samples:
                assert sample.labels["model_name"] == "fake"
                more = [v for k, v in sample.labels.items() if k != "model_name"]
                key = ",".join([sample.name.removeprefix("suzuri:"), *more])
                assert key not in self.values
                self.values[key] = sample.value

    def histogram(self, name: str) -> tuple[float, Any]:
        """(count, sum)."""
        count = self.values[f"{name}_count"]
        assert self.values[f"{name}_bucket,+Inf"] == count
        return count, pytest.approx(self.values[f"{name}_sum"])

    def below(self, name: str, bound: float) -> float:
        return self.values[f"{name}_bucket,{bound}"]


async def sheet(client: httpx.AsyncClient) -> Sheet:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Sheet(answer.text)


def scripted() -> tuple[FakeEngine, Clock, Service]:
    engine, clock = FakeEngine(), Clock()
    engine.holds = True
    return engine, clock, service(engine, clock=clock)


async def read(engine: FakeEngine, streams: int) -> None:
    """Until so many prompts have come to the engine, and all that it wrote has been read."""
    await until_async(
        lambda: len(engine.streams) == streams and not any(s.has_events for s in engine.streams)
    )


def token(index: int, cached: int = 0, waits: Waits | None = None, finish: Any = None) -> Event:
    return Event(0, index, 65, "A", finish, cached=cached, waits=waits)


def test_names_and_types_are_those_of_vllm() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        found = (await sheet(client)).kinds
        for kind, names in NAMES.items():
            for name in names.split():
                assert found[name] == kind, name

    run(service(FakeEngine()), scenario)


def test_times_and_tokens_of_two_answers() -> None:
    """A prompt of 4 tokens, 3 of them cached, two samples: every number by hand."""
    engine, clock, made = scripted()

    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"prompt": [1, 2, 3, 4], "n": 2, "max_tokens": 30, "stream": True}
        asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await read(engine, 1)
        (stream,) = engine.streams
        script: list[tuple[float, list[Event]]] = [
            (2.0, [token(0, 3, Waits(0.5, 1.4))]),
            (0.03, [token(0), token(1, 3, Waits(0.9, 1.1))]),
            (0.01, [token(0), token(1)]),
            (0.02, [token(0, finish="length"), token(1)]),
            (0.1, [token(1)]),
            (0.2, [token(1, finish="stop")]),
        ]
        for seconds, events in script:
            clock.now += seconds
            for event in events:
                stream.push(event)
            await read(engine, 1)
        assert (await asked).status_code == 200
        found = await sheet(client)
        values = found.values
        assert values["prompt_tokens_total"] == 4
        assert values["prompt_tokens_cached_total"] == 3
        assert values["generation_tokens_total"] == 9
        assert values["prefix_cache_queries_total"] == 8
        assert values["prefix_cache_hits_total"] == 6
        assert values["request_success_total,length"] == 1
        assert values["request_success_total,stop"] == 1
        assert values["request_success_total,abort"] == 0
        assert found.histogram("time_to_first_token_seconds") == (2, 2.0 + 2.03)
        assert found.histogram("inter_token_latency_seconds") == (7, 0.06 + 0.33)
        assert found.below("inter_token_latency_seconds", 0.05) == 5
        assert found.histogram("request_time_per_output_token_seconds") == (2, 0.02 + 0.33 / 4)
        assert found.histogram("e2e_request_latency_seconds") == (2, 2.06 + 2.36)
        assert found.histogram("request_queue_time_seconds") == (2, 1.4)
        assert found.histogram("request_prefill_time_seconds") == (2, 2.5)
        assert found.histogram("request_decode_time_seconds") == (2, 0.06 + 0.33)
        assert found.histogram("request_inference_time_seconds") == (2, 2.5 + 0.39)
        assert found.histogram("request_prompt_tokens") == (1, 4)
        assert found.histogram("request_generation_tokens") == (2, 9)
        assert found.histogram("request_params_n") == (1, 2)
        assert found.histogram("request_params_max_tokens") == (1, 30)

    run(made, scenario)


def test_several_prompts_of_one_request_count_each() -> None:
    engine, clock, made = scripted()

    async def scenario(client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": [[1, 2], [3]]}))
        await read(engine, 2)
        for seconds, stream in zip((1.0, 2.0), engine.streams, strict=True):
            clock.now += seconds
            stream.push(token(0, 0, Waits(0.0, seconds), "length"))
            await read(engine, 2)
        assert (await asked).status_code == 200
        found = await sheet(client)
        assert found.values["prompt_tokens_total"] == 3
        assert found.histogram("request_prompt_tokens") == (2, 3)
        assert found.histogram("request_params_n") == (2, 2)
        assert found.histogram("time_to_first_token_seconds") == (2, 1.0 + 3.0)
        assert found.histogram("e2e_request_latency_seconds") == (2, 1.0 + 3.0)
        # An answer of one token has no time between tokens.
        assert found.histogram("request_time_per_output_token_seconds") == (0, 0)

    run(made, scenario)


def test_how_answers_end() -> None:
    """Clients that leave are aborts, also of what had not begun; a lost engine is an error."""
    engine, clock, made = scripted()

    async def scenario(client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post(CHAT, json=chat(n=3)))
        await read(engine, 1)
        clock.now += 5.0
        engine.streams[0].push(token(0, 0, Waits(1.0, 2.0)))
        await read(engine, 1)
        clock.now += 1.0
        asked.cancel()
        await until_async(lambda: not made.works)
        found = await sheet(client)
        assert found.values["request_success_total,abort"] == 3
        assert found.values["generation_tokens_total"] == 1
        assert found.histogram("e2e_request_latency_seconds") == (3, 18.0)
        asked = asyncio.create_task(client.post(CHAT, json=chat()))
        await read(engine, 2)
        engine.streams[1].fail(EngineUnavailable("it died"))
        assert (await asked).status_code == 503
        found = await sheet(client)
        assert found.values["request_success_total,error"] == 1
        assert found.values["requests_refused_total,503"] == 1
        for number, stream_end in enumerate(("deadline", "error"), start=3):
            asked = asyncio.create_task(client.post(CHAT, json=chat()))
            await read(engine, number)
            engine.streams[-1].push(Event(0, 0, None, "", stream_end))
            assert (await asked).status_code in (500, 504)
        found = await sheet(client)
        assert found.values["request_success_total,error"] == 2
        assert found.values["request_success_total,deadline"] == 1
        assert found.values["request_success_total,abort"] == 3

    run(made, scenario)


def test_steps_of_the_engine() -> None:
    """Tokens per step, and preemptions that never go backwards when an engine starts anew."""
    engine, _, made = scripted()

    async def scenario(client: httpx.AsyncClient) -> None:
        assert engine.on_step is not None
        steps = [(512, 0), (3, 2), (0, 2), (3, 5), (1, 0), (1, 1)]
        for number, (tokens, preemptions) in enumerate(steps):
            stats = Stats(2, 1, number, 30, 40, 3, preemptions, tokens)
            engine.on_step(stats)
            engine.stats = stats
        found = await sheet(client)
        assert found.histogram("iteration_tokens_total") == (5, 520)
        assert found.below("iteration_tokens_total", 8.0) == 4
        assert found.values["num_preemptions_total"] == 6
        assert found.values["num_requests_running"] == 2
        assert found.values["num_requests_waiting"] == 1
        assert found.values["kv_cache_usage_perc"] == 0.75
        assert found.values["engine_ready"] == 1
        engine.ready, engine.stats = None, Stats()
        found = await sheet(client)
        assert found.values["engine_ready"] == 0
        assert found.values["num_requests_running"] == 0
        assert found.values["num_preemptions_total"] == 6

    run(made, scenario)
