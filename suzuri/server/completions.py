"""Completions: texts or ids in, what the model writes after them out, whole or as it comes."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec

from suzuri.engine.messages import Event, Logprobs
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.grammar_request import GrammarSpec, text_grammar
from suzuri.server.errors import invalid
from suzuri.server.logprobs import CompletionLogprobs, prompt_entries
from suzuri.server.schema import MAX_CHOICES, CompletionRequest
from suzuri.server.service import Service, Work, bound, sampling
from suzuri.server.streaming import DONE, event_frame
from suzuri.server.text_messages import Encode

DEFAULT_TOKENS = 16
"""Of an answer, as OpenAI's."""


async def start_completion(service: Service, body: CompletionRequest) -> Work:
    """Check, let in, encode and send to the engine. Raises ApiError; nothing is held then."""
    service.check_model(body.model)
    body.check()
    params = _params(body)
    prompts = _prompts(body)
    grammar = bound(params, lambda: _grammar(body))
    work = service.admit("cmpl", len(prompts) * body.choices)
    with contextlib.ExitStack() as undo:
        undo.callback(work.close)
        ids = await _encoded(service, prompts)
        wants = bool(body.return_token_ids or body.echo) or body.prompt_logprobs is not None
        for prompt in ids:
            work.add(
                prompt,
                params,
                priority=body.priority,
                salt=body.cache_salt,
                wants_prompt=wants,
                grammar=grammar,
            )
        await work.accepted()
        undo.pop_all()
    return work


def _params(body: CompletionRequest) -> SamplingParams:
    fields = body.sampling_fields()
    if "max_tokens" in body.model_fields_set:
        most = body.max_tokens
    else:
        most = DEFAULT_TOKENS
    if most == 0:
        most = 1  # the engine draws one at least; it is dropped
    fields["max_tokens"] = most
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
    return sampling(fields)


def _grammar(body: CompletionRequest) -> GrammarSpec | None:
    return text_grammar(
        body.response_format, regex=body.regex, grammar=body.grammar, choice=body.choice
    )


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt: is empty; give text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    if len(prompt) > MAX_CHOICES:
        raise invalid(f"prompt: has {len(prompt)} prompts; at most {MAX_CHOICES}", "prompt")
    return cast("list[str] | list[list[int]]", prompt)


async def _encoded(service: Service, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return (await service.ask(Encode(cast("list[str]", prompts)))).ids
    return cast("list[list[int]]", prompts)


class Sample:
    """One sample of one prompt."""

    def __init__(self, index: int, offset: int, service: Service) -> None:
        self.index = index
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Logprobs | None] = []
        self.finish: str | None = None
        self.stop: int | str | None = None
        self.names = CompletionLogprobs(service, offset)

    def push(self, event: Event) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.ids.append(event.token)
            self.logprobs.append(event.logprobs)
        if event.finish is not None:
            self.finish, self.stop = event.finish, event.stop


def _samples(work: Work, body: CompletionRequest) -> list[Sample]:
    count = len(work.streams) * body.choices
    return [Sample(index, 0, work.service) for index in range(count)]


async def whole_completion(work: Work, body: CompletionRequest) -> dict[str, Any]:
    """The response object. Raises ApiError."""
    samples = _samples(work, body)
    cached = 0
    prompts: dict[int, list[Logprobs]] = {}
    while not work.is_done:
        place, events = await work.next()
        for event in events:
            samples[place * body.choices + event.index].push(event)
            cached += event.cached if event.index == 0 else 0
            if event.prompt_logprobs is not None:
                prompts[place] = event.prompt_logprobs
    return {
        "id": work.id,
        "object": "text_completion",
        "created": work.created,
        "model": work.model,
        "choices": [_choice(work, body, sample, prompts) for sample in samples],
        "usage": _usage(work, body, samples, cached),
    }


def _choice(
    work: Work, body: CompletionRequest, sample: Sample, prompts: dict[int, list[Logprobs]]
) -> dict[str, Any]:
    place = sample.index // body.choices
    accepted = work.streams[place].accepted
    assert accepted is not None
    before = accepted.prompt or []
    ids, texts, found = sample.ids, sample.texts, sample.logprobs
    finish, stop = sample.finish, sample.stop
    if body.max_tokens == 0:
        ids, texts, found, finish, stop = [], [], [], "length", None
    choice: dict[str, Any] = {"index": sample.index, "finish_reason": finish, "stop_reason": stop}
    if body.return_token_ids:
        choice["token_ids"], choice["prompt_token_ids"] = ids, before
    if body.echo:
        spelled = b"".join(work.service.texts.token_bytes[id] for id in before)
        texts = [spelled.decode("utf-8", errors="replace"), *texts]
        known: list[Logprobs | None] = [None, *prompts.get(place, [])]
        ids, found = [*before, *ids], [*known, *found]
    choice["text"] = "".join(texts)
    choice["logprobs"] = None
    if body.logprobs is not None:
        choice["logprobs"] = sample.names.entries(ids, found, body.logprobs)
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_entries(
            work.service, before, prompts.get(place, []), body.prompt_logprobs
        )
    return choice


def _usage(
    work: Work, body: CompletionRequest, samples: list[Sample], cached: int
) -> dict[str, Any]:
    written = 0 if body.max_tokens == 0 else sum(len(sample.ids) for sample in samples)
    return {
        "prompt_tokens": work.num_prompt,
        "completion_tokens": written,
        "total_tokens": work.num_prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def completion_chunks(work: Work, body: CompletionRequest) -> AsyncIterator[bytes]:
    """The response as server-sent events. Raises ApiError."""
    samples = _samples(work, body)
    head, before, after = event_frame(work, "text_completion", usage=body.includes_usage)
    encode = msgspec.json.Encoder().encode
    cached = 0
    while not work.is_done:
        place, events = await work.next()
        parts: list[bytes] = []
        for event in events:
            sample = samples[place * body.choices + event.index]
            begins = not sample.texts
            sample.push(event)
            cached += event.cached if event.index == 0 else 0
            item = _chunk(work, body, sample, event, place if begins else None)
            if item is not None:
                parts += (before, encode(item), after)
        if parts:
            yield b"".join(parts)
    if body.includes_usage:
        last: dict[str, Any] = {**head, "choices": [], "usage": _usage(work, body, samples, cached)}
        yield b"data: " + encode(last) + b"\n\n"
    yield DONE


def _chunk(
    work: Work, body: CompletionRequest, sample: Sample, event: Event, begins: int | None
) -> dict[str, Any] | None:
    """choices[0] of an event's chunk; None when it has nothing to show."""
    empty = body.max_tokens == 0
    shows = event.token is not None and not empty
    wanted = shows and (body.logprobs is not None or bool(body.return_token_ids))
    if not (event.text or event.finish or wanted):
        return None
    item: dict[str, Any] = {
        "index": sample.index,
        "text": "" if empty else event.text,
        "logprobs": None,
        "finish_reason": "length" if empty and event.finish else event.finish,
    }
    if event.finish is not None:
        item["stop_reason"] = None if empty else event.stop
    if shows and event.token is not None:
        if body.logprobs is not None:
            found = [event.logprobs]
            item["logprobs"] = sample.names.entries([event.token], found, body.logprobs)
        if body.return_token_ids:
            item["token_ids"] = [event.token]
    accepted = None if begins is None else work.streams[begins].accepted
    if body.return_token_ids and accepted is not None:
        item["prompt_token_ids"] = accepted.prompt
    return item
