"""An engine and a text process that answer from a script, for tests of the HTTP side alone."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from suzuri.engine.client import EngineUnavailable, Stream
from suzuri.engine.messages import Accepted, Event, MediaInput, Ready, Stats
from suzuri.engine.sampling_params import SamplingParams
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
    """Writes `ids` for every sample of every request, `step` of them at a time."""

    def __init__(self, ids: Sequence[int] = (), *, finish: str = "stop", step: int = 1) -> None:
        self.ready: Ready | None = ready()
        self.why_not_ready = ""
        self.stats = Stats()
        self.num_restarts = 0
        self.ids, self.finish, self.step = list(ids), finish, step
        self.added: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[int] = []
        self.streams: list[Stream] = []
        self.holds = False
        """Whether requests are accepted and then left without an answer."""
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
    ) -> Stream:
        if self.ready is None:
            raise EngineUnavailable(self.why_not_ready)
        stream = Stream(len(self.added), params.n, self._abort)
        given: dict[str, Any] = {
            "media": media,
            "priority": priority,
            "deadline": deadline,
            "salt": salt,
        }
        given["grammar"] = grammar
        self.added.append((list(prompt), params, given))
        self.streams.append(stream)
        stream.accept(Accepted(stream.id, len(prompt), list(prompt) if wants_prompt else None))
        if not self.holds:
            task = asyncio.create_task(self._write(stream, params.n))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    def _abort(self, id: int) -> None:
        self.aborted.append(id)

    async def _write(self, stream: Stream, n: int) -> None:
        for place, id in enumerate(self.ids):
            for index in range(n):
                last = place + 1 == len(self.ids)
                finish = self.finish if last else None
                stream.push(Event(stream.id, index, id, "", finish))
            if place % self.step == 0:
                await asyncio.sleep(0)


class FakeTexts:
    """Ids are the bytes of a text; a conversation, checked as ever, is that of its last block."""

    def __init__(self, token_bytes: list[bytes] | None = None) -> None:
        self.token_bytes = token_bytes or [bytes([id % 256]) for id in range(NUM_IDS)]
        self.asked: list[Encode | Render] = []
        self.delay = 0.0

    async def ask(self, question: Encode | Render) -> Prompts:
        self.asked.append(question)
        await asyncio.sleep(self.delay)
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
