"""Completions: texts or ids in, what the model writes after them out, whole or as it comes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec

from suzuri.engine.messages import Event, Logprobs
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import FIRST_SPECIAL
from suzuri.processing.grammar_request import GrammarSpec, text_grammar
from suzuri.server.errors import invalid
from suzuri.server.logprobs import (
    CompletionLogprobs,
    PromptFirst,
    check_entries,
    joined,
    prompt_entries,
)
from suzuri.server.schema import MAX_CHOICES, CompletionRequest
from suzuri.server.service import Service, Work, bound, sampling
from suzuri.server.streaming import DONE, counted, event_frame
from suzuri.server.text_messages import Encode

DEFAULT_TOKENS = 16
"""Of an answer, as OpenAI's."""
_SENT_AT_ONCE = 2**16
"""Bytes of a stream that are collected before they go out."""


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
        ids = await _encoded(work, prompts)
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
        body.prompt, prompts, ids = "", [], []  # a long answer must not hold them
        await work.accepted()
        if tops := _prompt_part(body):  # now it is known how many tokens the model has for it
            check_entries(work.num_prompt, body.choices, tops)
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


def _prompt_part(body: CompletionRequest) -> dict[str, int | None]:
    """What is asked about prompts, as `check_entries` takes it."""
    found: dict[str, int | None] = {}
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        found["logprobs"] = body.logprobs
    if not found and body.echo:
        found["echo"] = None
    if not found and body.return_token_ids:
        found["return_token_ids"] = None
    return found


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


async def _encoded(work: Work, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return (await work.ask(Encode(cast("list[str]", prompts)))).ids
    return cast("list[list[int]]", prompts)


class Sample:
    """One sample of one prompt."""

    def __init__(self, index: int, place: int, service: Service, *, skip: bool) -> None:
        self.index = index
        self.place = place
        """The number of its prompt."""
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Logprobs | None] = []
        self.finish: str | None = None
        self.stop: int | str | None = None
        self.has_begun = False
        self.names = CompletionLogprobs(service, skip=skip)

    def push(self, event: Event) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.ids.append(event.token)
            self.logprobs.append(event.logprobs)
        if event.finish is not None:
            self.finish, self.stop = event.finish, event.stop


class _Shown:
    """What the choices of one prompt show of it, the same for all of them: `fields` of a choice, or
    of its first chunk in a stream, of which "text" is the beginning of the choice's own; so is
    `logprobs`, in the form of `CompletionLogprobs.encoded`. `offset`: where the answer begins."""

    def __init__(self, num_left: int) -> None:
        self.fields: dict[str, Any] = {}
        self.logprobs: dict[str, bytes] | None = None
        self.offset = 0
        self.num_left = num_left


class Answers:
    """All samples of a request, and what was asked about its prompts."""

    def __init__(self, work: Work, body: CompletionRequest) -> None:
        self._work, self._body = work, body
        self._skip = body.skip_special_tokens is not False
        self.samples = [
            Sample(index, index // body.choices, work.service, skip=self._skip)
            for index in range(len(work.streams) * body.choices)
        ]
        wanted = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
        self._prompt = PromptFirst(wanted=wanted)
        self._cached = 0
        self._shown: dict[int, _Shown] = {}

    def events(self, place: int, events: list[Event]) -> list[tuple[Sample, Event]]:
        """What came for a prompt, with the samples that it is for."""
        found: list[tuple[Sample, Event]] = []
        for event in self._prompt.through(place, events):
            self._cached += event.cached if event.index == 0 else 0
            found.append((self.samples[place * self._body.choices + event.index], event))
        return found

    def push_text(self, place: int, event: Event) -> tuple[int, str] | None:
        """`events` and `push` for a token that is neither the first nor the last, of a stream that
        shows texts alone, in a fraction of their time: the sample's index, and the text. None, and
        nothing is taken, where there is more to it."""
        sample = self.samples[place * self._body.choices + event.index]
        token = event.token
        if token is None or event.finish is not None or not sample.has_begun:
            return None
        sample.ids.append(token)
        return sample.index, event.text

    async def of_prompt(self, sample: Sample) -> "_Shown":
        """What a choice shows of its prompt. Once for each sample."""
        shown = self._shown.get(sample.place)
        if shown is None:
            shown = self._shown[sample.place] = await self._read_prompt(sample.place)
        sample.names.begin_at(shown.offset)
        shown.num_left -= 1
        if not shown.num_left:
            del self._shown[sample.place]
        return shown

    async def _read_prompt(self, place: int) -> "_Shown":
        work, body = self._work, self._body
        shown = _Shown(body.choices)
        ids, known = work.prompt(place), self._prompt.taken(place)
        if body.echo:
            shown.fields["text"] = self._spelled(ids)
            if body.logprobs is not None:
                names = CompletionLogprobs(work.service, skip=self._skip)
                shown.logprobs = await names.encoded(ids, [None, *known], body.logprobs)
                shown.offset = names.end_prompt()
        if body.return_token_ids:
            shown.fields["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(ids))
        if body.prompt_logprobs is not None:
            shown.fields["prompt_logprobs"] = await prompt_entries(
                work.service, ids, known, body.prompt_logprobs
            )
        return shown

    def _spelled(self, ids: list[int]) -> str:
        table = self._work.service.texts.token_bytes
        kept = [id for id in ids if id < FIRST_SPECIAL] if self._skip else ids
        return b"".join(table[id] for id in kept).decode("utf-8", errors="replace")

    def usage(self) -> dict[str, Any]:
        work = self._work
        is_empty = self._body.max_tokens == 0
        written = 0 if is_empty else sum(len(sample.ids) for sample in self.samples)
        return {
            "prompt_tokens": work.num_prompt,
            "completion_tokens": written,
            "total_tokens": work.num_prompt + written,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


async def whole_completion(work: Work, body: CompletionRequest) -> dict[str, Any]:
    """The response object. Raises ApiError."""
    answers = Answers(work, body)
    while not work.is_done:
        for sample, event in answers.events(*await work.next()):
            sample.push(event)
    return {
        "id": work.id,
        "object": "text_completion",
        "created": work.created,
        "model": work.model,
        "choices": [await _choice(answers, body, sample) for sample in answers.samples],
        "usage": answers.usage(),
    }


async def _choice(answers: Answers, body: CompletionRequest, sample: Sample) -> msgspec.Raw:
    """As JSON."""
    ids, texts, found = sample.ids, sample.texts, sample.logprobs
    finish, stop = sample.finish, sample.stop
    if body.max_tokens == 0:
        ids, texts, found, finish, stop = [], [], [], "length", None
    shown = await answers.of_prompt(sample)
    choice: dict[str, Any] = {
        "index": sample.index,
        "text": "",
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": stop,
        **shown.fields,
    }
    choice["text"] += "".join(texts)
    if body.logprobs is not None:
        own = await sample.names.encoded(ids, found, body.logprobs)
        choice["logprobs"] = joined(shown.logprobs or {}, own)
    if body.return_token_ids:
        choice["token_ids"] = ids
    await asyncio.sleep(0)  # others come between large choices
    return msgspec.Raw(msgspec.json.encode(choice))


async def completion_chunks(work: Work, body: CompletionRequest) -> AsyncGenerator[bytes]:
    """The response as server-sent events. Raises ApiError."""
    answers = Answers(work, body)
    head, before, after = event_frame(work, "text_completion", usage=body.includes_usage)
    encode = msgspec.json.Encoder().encode
    plain = [_plain(sample.index, before, after) for sample in answers.samples]
    is_simple = _is_simple(body)
    while not work.is_done:
        place, events = await work.next()
        if is_simple and len(events) == 1 and (text := answers.push_text(place, events[0])):
            index, shown = text
            if shown:
                yield b"".join((plain[index][0], encode(shown), plain[index][1]))
            continue
        parts: list[bytes] = []
        for sample, event in answers.events(place, events):
            sample.push(event)
            items: list[dict[str, Any]] = []
            if not sample.has_begun:
                sample.has_begun = True
                items += await _first_items(answers, sample)
            items += _items(body, sample, event)
            if body.counts_in_chunks:
                written = 0 if body.max_tokens == 0 else len(sample.ids)
                after = counted(work.num_prompt_of(sample.place), written)
            for item in items:
                data = encode(item)
                parts += (before, data, after)
                if len(data) > _SENT_AT_ONCE:
                    yield b"".join(parts)
                    parts.clear()
        if parts:
            yield b"".join(parts)
    if body.includes_usage:
        last: dict[str, Any] = {**head, "choices": [], "usage": answers.usage()}
        yield b"data: " + encode(last) + b"\n\n"
    yield DONE


def _is_simple(body: CompletionRequest) -> bool:
    """Whether a chunk has nothing but text."""
    asked = body.return_token_ids or body.echo or body.counts_in_chunks or body.max_tokens == 0
    return not asked and body.logprobs is None and body.prompt_logprobs is None


def _plain(index: int, before: bytes, after: bytes) -> tuple[bytes, bytes]:
    """What stands around the text in a chunk that has nothing else, the most frequent kind."""
    head = before + b'{"index":%d,"text":' % index
    return head, b',"logprobs":null,"finish_reason":null}' + after


async def _first_items(answers: Answers, sample: Sample) -> list[dict[str, Any]]:
    """The chunk with what a choice shows of its prompt."""
    shown = await answers.of_prompt(sample)
    if not shown.fields:
        return []
    item: dict[str, Any] = {"index": sample.index, "text": "", "logprobs": None}
    item |= {"finish_reason": None, **shown.fields}
    if shown.logprobs is not None:
        item["logprobs"] = joined(shown.logprobs)
    return [item]


def _items(body: CompletionRequest, sample: Sample, event: Event) -> list[dict[str, Any]]:
    """choices[0] of an event's chunks; none when it has nothing to show."""
    items: list[dict[str, Any]] = []
    is_empty = body.max_tokens == 0
    shows = event.token is not None and not is_empty
    wanted = shows and (body.logprobs is not None or bool(body.return_token_ids))
    if not ((event.text and not is_empty) or event.finish or wanted):
        return items
    item: dict[str, Any] = {
        "index": sample.index,
        "text": "" if is_empty else event.text,
        "logprobs": None,
        "finish_reason": "length" if is_empty and event.finish else event.finish,
    }
    if event.finish is not None:
        item["stop_reason"] = None if is_empty else event.stop
    if shows and event.token is not None:
        if body.logprobs is not None:
            found = [event.logprobs]
            item["logprobs"] = sample.names.entries([event.token], found, body.logprobs)
        if body.return_token_ids:
            item["token_ids"] = [event.token]
    items.append(item)
    return items
