"""Chat completions: a conversation in, the model's turn out, whole or as it comes.

`start_chat` lets a request in; `whole_chat` and `chat_chunks` both read `Choice`, so that a
streamed turn and a whole one are made of the same pieces.
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from suzuri.engine.chat_stops import StoppedTurn
from suzuri.engine.messages import ChatStops, Event
from suzuri.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from suzuri.model.config import FIRST_SPECIAL
from suzuri.processing.chat import DEFAULT_EFFORT
from suzuri.processing.chat_output import ChatOutputParser, Piece, collect
from suzuri.processing.grammar_request import GrammarSpec, chat_grammar
from suzuri.processing.tokenizer import CONTENT_INVOKE_TOOL_JSON, CONTENT_INVOKE_TOOL_TEXT
from suzuri.server.errors import invalid
from suzuri.server.logprobs import PromptFirst, chat_entry, check_entries, prompt_entries
from suzuri.server.schema import ChatRequest
from suzuri.server.service import Service, Work, bound, sampling
from suzuri.server.streaming import DONE, counted, event_frame
from suzuri.server.text_messages import render

NEVER = -100.0
"""A bias that no logit outweighs."""


async def start_chat(service: Service, body: ChatRequest) -> Work:
    """Check, let in, render and send to the engine. Raises ApiError; nothing is held then."""
    service.check_model(body.model)
    body.check()
    params = _params(body)
    grammar = bound(params, lambda: _grammar(body))
    work = service.admit("chatcmpl", body.choices)
    with contextlib.ExitStack() as undo:
        undo.callback(work.close)
        prompts = await work.ask(
            render(
                body.messages,
                body.tools,
                DEFAULT_EFFORT if body.reasoning_effort is None else body.reasoning_effort,
                body.add_generation_prompt is not False,
            )
        )
        work.add(
            prompts.ids[0],
            params,
            media=prompts.media,
            priority=body.priority,
            salt=body.cache_salt,
            wants_prompt=bool(body.return_token_ids) or body.prompt_logprobs is not None,
            grammar=grammar,
            chat_stops=ChatStops(body.may_call) if params.stop_strings else None,
        )
        body.messages, prompts = [], None  # a long answer must not hold them
        await work.accepted()
        if body.prompt_logprobs is not None:
            check_entries(work.num_prompt, 1, {"prompt_logprobs": body.prompt_logprobs})
        undo.pop_all()
    return work


def _params(body: ChatRequest) -> SamplingParams:
    fields = body.sampling_fields()
    most = body.most_tokens
    if most is not None and most < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise invalid(f"{name} = {most}: must be at least 1", name)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise invalid(
            f"top_logprobs = {body.top_logprobs}: must be from 0 to {MAX_LOGPROBS}", "top_logprobs"
        )
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    if body.tools and body.tool_choice == "none":
        never = {CONTENT_INVOKE_TOOL_JSON: NEVER, CONTENT_INVOKE_TOOL_TEXT: NEVER}
        fields["logit_bias"] = {**fields.get("logit_bias", {}), **never}
    # The text is read from the ids, here as in the engine.
    fields.pop("skip_special_tokens", None)
    return sampling({**fields, "max_tokens": most, "detokenize": bool(fields.get("stop"))})


def _grammar(body: ChatRequest) -> GrammarSpec | None:
    return chat_grammar(
        body.response_format,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        regex=body.regex,
        grammar=body.grammar,
        choice=body.choice,
        add_generation_prompt=body.add_generation_prompt is not False,
    )


class Choice:
    """One sample of a turn, as it comes.

    `push` gives what an event brings: pieces to show. `finish` is OpenAI's reason once the turn has
    ended.
    """

    def __init__(
        self, service: Service, index: int, params: SamplingParams, *, tools: bool
    ) -> None:
        self.index = index
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = self.num_reasoning = self.num_calls = 0
        self._tools, self._shows_stop = tools, params.include_stop_str_in_output
        token_bytes = service.texts.token_bytes.__getitem__
        self._parser = (
            StoppedTurn(params, token_bytes, tools=tools)
            if params.stop_strings
            else ChatOutputParser(token_bytes, tools=tools)
        )

    def push(self, event: Event) -> list[Piece]:
        pieces: list[Piece] = []
        token, finish = event.token, event.finish
        if token is not None:
            self.num_tokens += 1
            if finish is None or self._has_text(event):
                pieces = self._parser.push((token,))
            for piece in pieces:
                if piece.kind == "reasoning":
                    self.num_reasoning += 1
                    break
        if finish is not None:
            pieces += self._parser.finish()
            self.stop_reason = event.stop
        if self._tools:
            for piece in pieces:
                self.num_calls += piece.kind == "tool_start"
        if finish is not None:
            self.finish = "tool_calls" if finish == "stop" and self.num_calls else finish
        return pieces

    def push_text(self, token: int) -> tuple[str, str] | None:
        """`push` for a token of text that is neither the first nor the last, in a fraction of its
        time: the kind of its block, and its text. None, and nothing is taken, where there is more
        to it."""
        parser = self._parser
        if not isinstance(parser, ChatOutputParser):
            return None
        text = parser.push_text(token)
        if text is None:
            return None
        self.num_tokens += 1
        kind = parser.block
        if text and kind == "reasoning":
            self.num_reasoning += 1
        return kind, text

    def _has_text(self, event: Event) -> bool:
        """Whether the last token is to be read: a stop id's text is not shown."""
        token = event.token
        is_stop_id = event.finish == "stop" and type(event.stop) is int and event.stop == token
        return not is_stop_id or self._shows_stop or (token or 0) >= FIRST_SPECIAL


Part = tuple[Choice, Event, list[Piece], bool]
"""What one event brought to a choice, and whether it was the last one."""


class Turn:
    """All choices of a request; `parts` takes what came for them, until `is_over`."""

    def __init__(self, work: Work, body: ChatRequest) -> None:
        params = _params(body)
        self.choices = [
            Choice(work.service, index, params, tools=body.may_call)
            for index in range(body.choices)
        ]
        self.prompt = PromptFirst(wanted=body.prompt_logprobs is not None)
        self.cached = 0
        self._left = len(self.choices)

    @property
    def is_over(self) -> bool:
        return self._left == 0

    def each(self, events: list[Event]) -> Iterator[Part]:
        """`parts`, one event after the other: a choice has counted no token that is still to
        come."""
        for event in events:
            yield from self.parts([event])

    def parts(self, events: list[Event]) -> list[Part]:
        found: list[Part] = []
        for event in self.prompt.through(0, events):
            choice = self.choices[event.index]
            pieces = choice.push(event)
            ends = choice.finish is not None
            found.append((choice, event, pieces, ends))
            if event.cached and event.index == 0:
                self.cached = event.cached
            if ends:
                self._left -= 1
        return found


async def whole_chat(work: Work, body: ChatRequest) -> dict[str, Any]:
    """The response object. Raises ApiError."""
    turn = Turn(work, body)
    choices = turn.choices
    pieces: list[list[Piece]] = [[] for _ in choices]
    ids: list[list[int]] = [[] for _ in choices]
    entries: list[list[msgspec.Raw]] = [[] for _ in choices]
    encode = msgspec.json.Encoder().encode
    while not turn.is_over:
        _, events = await work.next()
        for choice, event, new, _ in turn.parts(events):
            pieces[choice.index] += new
            if event.token is not None:
                ids[choice.index].append(event.token)
                if event.logprobs is not None:
                    top = body.top_logprobs or 0
                    entry = chat_entry(work.service, event.token, event.logprobs, top)
                    entries[choice.index].append(msgspec.Raw(encode(entry)))
    response: dict[str, Any] = {
        "id": work.id,
        "object": "chat.completion",
        "created": work.created,
        "model": work.model,
        "choices": [
            {
                "index": choice.index,
                "message": _message(pieces[choice.index]),
                "logprobs": {"content": entries[choice.index]} if body.logprobs else None,
                "finish_reason": choice.finish,
                "stop_reason": choice.stop_reason,
                **({"token_ids": ids[choice.index]} if body.return_token_ids else {}),
            }
            for choice in choices
        ],
        "usage": _usage(work, turn),
    }
    return response | await _of_prompt(work, body, turn)


async def _of_prompt(work: Work, body: ChatRequest, turn: Turn) -> dict[str, Any]:
    """What was asked about the prompt: fields of the response, or of a stream's first chunk."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["prompt_token_ids"] = work.prompt(0)
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = await prompt_entries(
            work.service, work.prompt(0), turn.prompt.taken(0), body.prompt_logprobs
        )
    return found


def _message(pieces: list[Piece]) -> dict[str, Any]:
    found = collect(pieces)
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning is not None:
        message["reasoning_content"] = found.reasoning
    if found.tool_calls:
        message["tool_calls"] = [
            {
                "id": _call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in found.tool_calls
        ]
    return message


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _usage(work: Work, turn: Turn) -> dict[str, Any]:
    choices = turn.choices
    written = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": work.num_prompt,
        "completion_tokens": written,
        "total_tokens": work.num_prompt + written,
        "prompt_tokens_details": {"cached_tokens": turn.cached},
        "completion_tokens_details": {"reasoning_tokens": sum(c.num_reasoning for c in choices)},
    }


async def chat_chunks(work: Work, body: ChatRequest) -> AsyncGenerator[bytes]:
    """The response as server-sent events. Raises ApiError."""
    turn = Turn(work, body)
    head, before, after = event_frame(work, "chat.completion.chunk", usage=body.includes_usage)
    encode = msgspec.json.Encoder().encode
    plain = [_plain(choice.index, before, after) for choice in turn.choices]
    counts = body.counts_in_chunks
    only_text = not (body.logprobs or body.return_token_ids or counts)
    is_simple = only_text and body.prompt_logprobs is None
    begun: set[int] = set()
    while not turn.is_over:
        _, events = await work.next()
        parts: list[bytes] = []
        if is_simple and len(events) == 1 and events[0].index in begun:
            (event,) = events
            token = event.token
            if token is not None and event.finish is None:
                found = turn.choices[event.index].push_text(token)
                if found is not None:
                    kind, text = found
                    if text:
                        around = plain[event.index][kind]
                        yield b"".join((around[0], encode(text), around[1]))
                    continue
        for part in turn.each(events) if counts else turn.parts(events):
            choice, _, pieces, ends = part
            index = choice.index
            if counts:
                after = counted(work.num_prompt, choice.num_tokens)
            if only_text and not ends and index in begun:
                if not pieces:
                    continue
                if len(pieces) == 1 and (around := plain[index].get(pieces[0].kind)):
                    parts += (around[0], encode(pieces[0].text), around[1])
                    continue
            for item in _chunks(work, body, part, begins=index not in begun):
                if not begun and (more := await _of_prompt(work, body, turn)):
                    opened = b"data: " + encode({**head, **more})[:-1] + b',"choices":['
                    parts += (opened, encode(item), after)
                else:
                    parts += (before, encode(item), after)
                begun.add(index)
        if parts:
            yield b"".join(parts)
    if body.includes_usage:
        last: dict[str, Any] = {**head, "choices": [], "usage": _usage(work, turn)}
        yield b"data: " + encode(last) + b"\n\n"
    yield DONE


def _plain(index: int, before: bytes, after: bytes) -> dict[str, tuple[bytes, bytes]]:
    """What stands around the text in a chunk that has nothing else, the most frequent kind."""
    names = {"content": "content", "reasoning": "reasoning_content"}
    head = before + b'{"index":%d,"delta":{"' % index
    tail = b'},"logprobs":null,"finish_reason":null}' + after
    return {kind: (head + name.encode() + b'":', tail) for kind, name in names.items()}


def _chunks(work: Work, body: ChatRequest, part: Part, *, begins: bool) -> list[dict[str, Any]]:
    """choices[0] of the chunks that an event makes."""
    choice, event, pieces, ends = part
    deltas = [_delta(piece) for piece in pieces if piece.kind != "tool_end"]
    details: dict[str, Any] = {"logprobs": None}
    if event.token is not None:
        if event.logprobs is not None and body.logprobs:
            entry = chat_entry(work.service, event.token, event.logprobs, body.top_logprobs or 0)
            details["logprobs"] = {"content": [entry]}
        if body.return_token_ids:
            details["token_ids"] = [event.token]
    items: list[dict[str, Any]] = []
    if begins:
        first: dict[str, Any] = {"index": choice.index, "delta": {"role": "assistant"}}
        first |= {"logprobs": None, "finish_reason": None}
        items.append(first)
    if not deltas and len(details) + (details["logprobs"] is not None) > 1:
        deltas.append({})
    for delta in deltas:
        items.append({"index": choice.index, "delta": delta, **details, "finish_reason": None})
        details = {"logprobs": None}
    if ends:
        items.append(
            {
                "index": choice.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": choice.finish,
                "stop_reason": choice.stop_reason,
            }
        )
    return items


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.kind:
        case "content":
            return {"content": piece.text}
        case "reasoning":
            return {"reasoning_content": piece.text}
        case "tool_start":
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": _call_id(), "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case _:
            function = {"arguments": piece.text}
            return {"tool_calls": [{"index": piece.index, "function": function}]}
