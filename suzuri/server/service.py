"""What all requests of one server share, and how one is let in, followed and let go."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from suzuri.engine.client import Stream
from suzuri.engine.messages import Event, MediaInput, Ready, Stats
from suzuri.engine.sampling_params import MAX_N, SamplingParams
from suzuri.processing.grammar_request import GrammarSpec
from suzuri.server.errors import (
    FROM_PROCESSES,
    RETRY_SECONDS,
    ApiError,
    as_api_error,
    invalid,
    unavailable,
)
from suzuri.server.metrics import Metrics
from suzuri.server.text_messages import Encode, Prompts, Render


class EngineLike(Protocol):
    """What the server needs of suzuri.engine.client.EngineClient."""

    ready: Ready | None
    why_not_ready: str
    stats: Stats
    num_restarts: int

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
    ) -> Stream: ...


class TextsLike(Protocol):
    """What the server needs of suzuri.server.text_client.Texts."""

    token_bytes: list[bytes]

    async def ask(self, question: Encode | Render) -> Prompts: ...


@dataclasses.dataclass(kw_only=True)
class Service:
    """`names`: of the model, the one in answers first. `most_pending`: samples let in at one time;
    seconds as in ServeConfig."""

    engine: EngineLike
    texts: TextsLike
    names: tuple[str, ...]
    most_pending: int = 1088
    request_seconds: float = 3600.0
    reader_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.names[0])
        self.created = int(time.time())
        self.is_draining = False
        self.num_pending = 0
        """Samples of all requests that are let in."""
        self.works: set[Work] = set()
        self._names = set(self.names)

    def why_not_ready(self) -> str | None:
        """None while requests are taken."""
        if self.is_draining:
            return "the server is shutting down"
        if self.engine.ready is None:
            return self.engine.why_not_ready
        return None if self.texts.token_bytes else "the server is loading"

    def ready(self) -> Ready:
        """Raises ApiError 503 while nothing is taken."""
        why, ready = self.why_not_ready(), self.engine.ready
        if why is not None or ready is None:
            raise unavailable(why or self.engine.why_not_ready)
        return ready

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"there is no model {name!r} here; there is {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def admit(self, kind: str, samples: int) -> "Work":
        """Let a request of so many samples in. Raises ApiError 503 or, when too many wait, 429."""
        self.ready()
        if self.num_pending + samples > self.most_pending:
            raise ApiError(
                429,
                f"{self.num_pending} answers run or wait, and at most {self.most_pending} may; "
                "send the request again later",
                code="queue_full",
                retry=RETRY_SECONDS,
            )
        work = Work(self, kind, samples)
        self.works.add(work)
        self.num_pending += samples
        return work

    async def ask(self, question: Encode | Render) -> Prompts:
        """Encode or render. Raises ApiError."""
        try:
            return await self.texts.ask(question)
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error
        except UnicodeEncodeError as error:
            raise invalid("the text holds half of a surrogate pair; send valid Unicode") from error

    def spelled(self, id: int) -> str:
        """The text of one id by itself; one that structures a turn has none and is named."""
        return self.texts.token_bytes[id].decode("utf-8", errors="replace")


class Work:
    """One request that was let in. `close` frees everything it holds, wherever it stands."""

    def __init__(self, service: Service, kind: str, samples: int) -> None:
        self.service = service
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = service.names[0]
        self.streams: list[Stream] = []
        self.told: asyncio.Event = asyncio.Event()
        self._samples, self._ended = samples, 0
        self._began = time.monotonic()
        self._written: dict[int, _Written] = {}
        """By the number of the prompt and the sample."""
        self.is_open = True
        self._feed: AsyncIterator[tuple[int, list[Event]]] | None = None

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        media: Sequence[MediaInput] = (),
        priority: int | None = None,
        salt: str | None = None,
        wants_prompt: bool = False,
        grammar: GrammarSpec | None = None,
    ) -> None:
        """Send one prompt to the engine. Raises ApiError."""
        assert self.is_open
        left = self.service.request_seconds - (time.monotonic() - self._began)
        if left <= 0:
            raise self.timed_out()
        try:
            stream = self.service.engine.add(
                prompt,
                params,
                media=media,
                priority=priority or 0,
                deadline=left,
                salt=salt,
                wants_prompt=wants_prompt,
                grammar=grammar,
            )
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise invalid(
                "a text holds half of a surrogate pair, or an integer has more than 64 bits"
            ) from error
        self.streams.append(stream)

    async def accepted(self) -> None:
        """Until the engine has taken every prompt. Raises ApiError."""
        metrics = self.service.metrics
        try:
            for stream in self.streams:
                accepted = await stream.wait_accepted()
                metrics.prompt_tokens.inc(accepted.num_prompt)
                metrics.prefix_queries.inc(accepted.num_prompt)
                metrics.prompt_sizes.observe(accepted.num_prompt)
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error
        metrics.choices.observe(self._samples)

    @property
    def num_prompt(self) -> int:
        return sum(s.accepted.num_prompt for s in self.streams if s.accepted is not None)

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended and been seen."""
        return self._ended == self._samples

    async def next(self) -> tuple[int, list[Event]]:
        """The number of a prompt and what has come for it. Not after `is_done`.

        Raises ApiError, also for a sample that ended by a fault or its deadline.
        """
        try:
            if len(self.streams) == 1:
                stream = self.streams[0]
                if not stream.has_events:
                    await stream.wait()
                return 0, self._seen(0, stream.take())
            if self._feed is None:
                self._feed = _together(self.streams)
            place, events = await anext(self._feed)
            return place, self._seen(place, events)
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error

    def _seen(self, place: int, events: list[Event]) -> list[Event]:
        metrics, now = self.service.metrics, time.monotonic()
        place *= MAX_N
        for event in events:
            key = place + event.index
            written = self._written.get(key)
            if written is None:
                written = self._written[key] = _Written()
            if event.token is not None:
                if written.count:
                    metrics.between_tokens.observe(now - written.last)
                else:
                    metrics.first_token.observe(now - self._began)
                    metrics.prefix_hits.inc(event.cached)
                written.last = now
                written.count += 1
            if event.finish is not None:
                self._ended += 1
                metrics.finished(event.finish)
                metrics.answer_sizes.observe(written.count)
                if event.finish == "deadline":
                    raise self.timed_out()
                if event.finish == "error":
                    raise ApiError(500, event.error or "the engine failed on this request")
        return events

    def timed_out(self) -> ApiError:
        limit = self.service.request_seconds
        return ApiError(504, f"the answer took more than {limit:g} s, the most allowed here")

    def close(self) -> None:
        """May be called again."""
        if not self.is_open:
            return
        self.is_open = False
        for stream in self.streams:
            stream.close()
        self.service.num_pending -= self._samples
        self.service.works.discard(self)
        written = sum(sample.count for sample in self._written.values())
        self.service.metrics.generation_tokens.inc(written)
        self.service.metrics.whole.observe(time.monotonic() - self._began)

    def tell(self, error: Exception) -> None:
        """End the request with an error, as at the end of a drain."""
        for stream in self.streams:
            if stream.num_left:
                stream.close()
                stream.fail(error)


class _Written:
    """The tokens of one sample so far, and when the last one came."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count, self.last = 0, 0.0


async def _together(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Event]]]:
    """Events of several streams, as they come."""
    waiting = {
        asyncio.ensure_future(stream.next()): place
        for place, stream in enumerate(streams)
        if not stream.is_done
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                events = task.result()
                if not streams[place].is_done:
                    waiting[asyncio.ensure_future(streams[place].next())] = place
                yield place, events
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def sampling(fields: dict[str, object]) -> SamplingParams:
    """Checked parameters. Raises ApiError naming the field."""
    try:
        return SamplingParams(**fields)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise invalid(str(error)) from error


def bound(params: SamplingParams, spec: Callable[[], GrammarSpec | None]) -> GrammarSpec | None:
    """The form of an output, checked with what it must not be combined with. Raises ApiError."""
    try:
        found = spec()
    except ValueError as error:
        raise invalid(str(error)) from error
    if found is not None:
        for name, given in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens)):
            if given:
                raise invalid(
                    f"{name}: an output that must have a form ends where it is whole", name
                )
    return found
