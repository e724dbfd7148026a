"""An engine and a text process that answer from a script, for tests of the HTTP side alone."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from suzuri.engine.chat_stops import ChatStopChecker
from suzuri.engine.messages import (
    Accepted,
    Add,
    ChatStops,
    Event,
    Logprobs,
    MediaInput,
    Ready,
    Stats,
    WeightsUpdated,
    encode,
)
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stopping import StopChecker
from suzuri.engine.stream import EngineUnavailable, Stream
from suzuri.model.config import NUM_IDS, preset
from suzuri.processing.chat_blocks import to_blocks, tool_block
from suzuri.processing.grammar_request import GrammarSpec
from suzuri.server.service import Service
from suzuri.server.text_client import TextRefused
from suzuri.server.text_messages import Encode, Prompts, Render


def ready() -> Ready:
    return Ready(
        version=1,
        model="fake",
        max_context=4096,
        max_running=64,
        config=preset("tiny"),
        dtype="bfloat16",
        device="cpu",
        weight_version=0,
        fingerprint={"arch": "none"},
    )


class FakeEngine:
    """Writes `ids` for every sample of every request, `step` of them at a time, up to what stops
    them. `turns`: the ids of one request after the other, in place of `ids`."""

    def __init__(
        self,
        ids: Sequence[int] = (),
        *,
        finish: str = "stop",
        step: int = 1,
        turns: Iterable[Sequence[int]] = (),
    ) -> None:
        self.ready: Ready | None = ready()
        self.why_not_ready = ""
        self.stats = Stats()
        self.num_restarts = 0
        self.on_step: Callable[[Stats], None] | None = None
        self.ids, self.finish, self.step = list(ids), finish, step
        self.turns = iter(turns)
        self.added: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[int] = []
        self.streams: list[Stream] = []
        self.holds = False
        """Whether requests are accepted and then left without an answer."""
        self.token_bytes = [bytes([id % 256]) for id in range(NUM_IDS)]
        self._tasks: set[asyncio.Task[None]] = set()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        media: Sequence[MediaInput] = (),
        priority: int = 0,
        deadline: float | None = None,
        salt: str | None = None,
        wants_prompt: bool = False,
        grammar: GrammarSpec | None = None,
        chat_stops: ChatStops | None = None,
        may_restart: bool = False,
    ) -> Stream:
        if self.ready is None:
            raise EngineUnavailable(self.why_not_ready)
        add = Add(
            id=0,
            prompt=list(prompt),
            params=params,
            media=list(media),
            priority=priority,
            deadline=deadline,
            salt=salt,
            grammar=grammar,
            chat_stops=chat_stops,
        )
        encode(add)
        stream = Stream(len(self.added), params.n, self._abort)
        given: dict[str, Any] = {
            "media": media,
            "priority": priority,
            "deadline": deadline,
            "salt": salt,
            "grammar": grammar,
            "chat_stops": chat_stops,
        }
        self.added.append((list(prompt), params, given))
        self.streams.append(stream)
        stream.accept(Accepted(stream.id, len(prompt), list(prompt) if wants_prompt else None))
        if not self.holds:
            self.run(self._write(stream, list(prompt), params, chat_stops))
        return stream

    async def update_weights(self, folder: str, **fields: Any) -> WeightsUpdated:
        raise AssertionError(f"{folder}: not asked for")

    def run(self, writing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(writing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _abort(self, id: int) -> None:
        self.aborted.append(id)

    async def _write(
        self, stream: Stream, prompt: list[int], params: SamplingParams, chat: ChatStops | None
    ) -> None:
        ids = list(next(self.turns, self.ids))
        events = [
            self._events(stream.id, index, ids, prompt, params, chat) for index in range(params.n)
        ]
        # Sample 0 comes last: what is owed to its prompt must not be missed by the others.
        for place in range(max(map(len, events))):
            for own in reversed(events):
                if place < len(own):
                    stream.push(own[place])
            if place % self.step == 0:
                await asyncio.sleep(0)

    def _events(
        self,
        id: int,
        index: int,
        ids: list[int],
        prompt: list[int],
        params: SamplingParams,
        chat: ChatStops | None,
    ) -> list[Event]:
        spell = self.token_bytes.__getitem__
        most = params.max_tokens
        checker = (
            StopChecker(params, spell, eos_token_id=None, limit=most)
            if chat is None
            else ChatStopChecker(params, spell, tools=chat.tools, eos_token_id=None, limit=most)
        )
        events: list[Event] = []
        for token in ids:
            text, stop, _ = checker.push([token])
            finish = None if stop is None else stop.reason
            matched = None if stop is None else stop.matched
            if stop is None and len(events) + 1 == len(ids):
                finish, text = self.finish, text + checker.finish()
            found = None if params.logprobs is None else logprobs(token, params.logprobs)
            prompt_found: list[Logprobs] | None = None
            if not events and index == 0 and params.prompt_logprobs is not None:
                prompt_found = [logprobs(one, params.prompt_logprobs) for one in prompt[1:]]
            events.append(
                Event(
                    *(id, index, token, text, finish, matched, found),
                    prompt_logprobs=prompt_found,
                )
            )
            if finish is not None:
                break
        return events or [Event(id, index, None, "", "abort")]


def logprobs(token: int, top: int) -> Logprobs:
    """Of a token that is the second most likely one."""
    pairs = [(token + 1, -0.5), (token, -1.0 - token / 1000), (token + 2, -3.0)]
    return Logprobs(pairs[1][1], None, tuple(pairs[:top]))


class Clock:
    """In place of the module `time`: seconds that pass when they are told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class FakeTexts:
    """Ids are the bytes of a text; a conversation, checked as ever, is that of its last block."""

    def __init__(self, token_bytes: list[bytes] | None = None) -> None:
        self.token_bytes = token_bytes or [bytes([id % 256]) for id in range(NUM_IDS)]
        self.asked: list[Encode | Render] = []
        self.may_answer = asyncio.Event()
        """Cleared: questions wait."""
        self.may_answer.set()
        self.why_not_ready: str | None = None

    async def ask(self, question: Encode | Render) -> Prompts:
        self.asked.append(question)
        await self.may_answer.wait()
        if isinstance(question, Encode):
            return Prompts([list(text.encode()) for text in question.texts])
        try:
            blocks = to_blocks(json.loads(question.messages), None)
            tool_block(json.loads(question.tools))
            return Prompts([list("".join(block.text for block in blocks[-1:]).encode())])
        except ValueError as error:
            raise TextRefused(str(error)) from error


def service(engine: FakeEngine, **fields: Any) -> Service:
    return Service(engine=engine, texts=FakeTexts(), names=("fake",), **fields)
