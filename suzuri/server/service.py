"""What all requests of one server share, and how one is let in, followed and let go."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from suzuri.engine.messages import (
    ChatStops,
    Event,
    MediaInput,
    OnPublish,
    Ready,
    Stats,
    WeightsUpdated,
)
from suzuri.engine.sampling_params import MAX_N, SamplingParams
from suzuri.engine.stream import Stream
from suzuri.processing.grammar_request import GrammarSpec
from suzuri.server.errors import (
    FROM_PROCESSES,
    RETRY_SECONDS,
    ApiError,
    as_api_error,
    invalid,
    sending,
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
    on_step: Callable[[Stats], None] | None

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
    ) -> Stream: ...

    async def update_weights(
        self,
        folder: str,
        *,
        version: int | None = None,
        content_hash: str | None = None,
        replaces: int | None = None,
        on_publish: OnPublish = "finish",
    ) -> WeightsUpdated: ...


class TextsLike(Protocol):
    """What the server needs of suzuri.server.text_client.Texts."""

    token_bytes: list[bytes]

    @property
    def why_not_ready(self) -> str | None: ...

    async def ask(self, question: Encode | Render) -> Prompts: ...


@dataclasses.dataclass(kw_only=True)
class Service:
    """`names`: of the model, the one in answers first. `most_pending`: samples let in at one time,
    and texts that are encoded or rendered; seconds as in ServeConfig; `clock` for all of them."""

    engine: EngineLike
    texts: TextsLike
    names: tuple[str, ...]
    most_pending: int = 1088
    request_seconds: float = 3600.0
    reader_seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    allows_weight_updates: bool = False

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.names[0])
        self.engine.on_step = self.metrics.step
        self.created = int(time.time())
        self.is_draining = False
        self.num_pending = 0
        """Samples of all requests that are let in."""
        self._num_asked = 0
        """Questions to the text processes."""
        self.works: set[Work] = set()
        self._names = set(self.names)

    def why_not_ready(self) -> str | None:
        """None while requests are taken."""
        if self.is_draining:
            return "the server is shutting down"
        if self.engine.ready is None:
            return self.engine.why_not_ready
        if not self.texts.token_bytes:
            return "the server is loading"
        return self.texts.why_not_ready

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
        """Let a request of so many samples in. Raises ApiError 503, 400 for more than may ever be
        held, or, when too many wait, 429."""
        self.ready()
        if samples > self.most_pending:
            raise invalid(
                f"n: the request wants {samples} answers (prompts times n); at most "
                f"{self.most_pending} may run or wait here; send it in parts",
                "n",
            )
        if self.num_pending + samples > self.most_pending:
            raise self._full(f"{self.num_pending} answers run or wait")
        work = Work(self, kind, samples)
        self.works.add(work)
        self.num_pending += samples
        return work

    def _full(self, what: str) -> ApiError:
        message = f"{what}, and at most {self.most_pending} may; send the request again later"
        return ApiError(429, message, code="queue_full", retry=RETRY_SECONDS)

    async def ask(self, question: Encode | Render) -> Prompts:
        """Encode or render. Raises ApiError."""
        if self._num_asked >= self.most_pending:
            raise self._full(f"{self._num_asked} texts are being read")
        self._num_asked += 1
        try:
            return await self.texts.ask(question)
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error
        except UnicodeEncodeError as error:
            raise invalid("the text holds half of a surrogate pair; send valid Unicode") from error
        finally:
            self._num_asked -= 1

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
        self._told: asyncio.Future[None] | None = None
        self._end: Exception | None = None
        self._samples, self._ended = samples, 0
        self._n = 1
        self._began = service.clock()
        self._written: dict[int, _Written] = {}
        """By the number of the prompt and the sample."""
        self.is_open = True
        self._place = 0

    async def ask(self, question: Encode | Render) -> Prompts:
        """Encode or render. Raises ApiError, at once if the request is told to end."""
        loop = asyncio.get_running_loop()
        asked, self._told = loop.create_task(self.service.ask(question)), loop.create_future()
        try:
            await asyncio.wait({asked, self._told}, return_when=asyncio.FIRST_COMPLETED)
            self._check_end()
            return asked.result()
        finally:
            self._told = None
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def _check_end(self) -> None:
        if self._end is not None:
            raise as_api_error(self._end) from self._end

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
        chat_stops: ChatStops | None = None,
        may_restart: bool = False,
    ) -> None:
        """Send one prompt to the engine. Raises ApiError."""
        assert self.is_open
        self._check_end()
        left = self.service.request_seconds - (self.service.clock() - self._began)
        if left <= 0:
            raise self.timed_out()
        with sending():
            stream = self.service.engine.add(
                prompt,
                params,
                media=media,
                priority=priority or 0,
                deadline=left,
                salt=salt,
                wants_prompt=wants_prompt,
                grammar=grammar,
                chat_stops=chat_stops,
                may_restart=may_restart,
            )
        self.streams.append(stream)
        self._n = params.n
        metrics = self.service.metrics
        metrics.choices.observe(params.n)
        if params.max_tokens is not None:
            metrics.most_tokens.observe(params.max_tokens)

    async def accepted(self) -> None:
        """Until the engine has taken every prompt. Raises ApiError."""
        metrics = self.service.metrics
        try:
            for stream in self.streams:
                accepted = await stream.wait_accepted()
                metrics.prompt_tokens.inc(accepted.num_prompt)
                metrics.prompt_sizes.observe(accepted.num_prompt)
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error

    @property
    def num_prompt(self) -> int:
        return sum(s.accepted.num_prompt for s in self.streams if s.accepted is not None)

    def num_prompt_of(self, place: int) -> int:
        """Tokens of one prompt, once it is accepted."""
        accepted = self.streams[place].accepted
        return 0 if accepted is None else accepted.num_prompt

    def prompt(self, place: int) -> list[int]:
        """The ids of a prompt as the model reads them, if they were wanted."""
        accepted = self.streams[place].accepted
        return (accepted.prompt if accepted is not None else None) or []

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended and been seen."""
        return self._ended == self._samples

    @property
    def is_behind(self) -> bool:
        """Whether the reader has left too much unread."""
        return any(stream.is_behind for stream in self.streams)

    async def next(self) -> tuple[int, list[Event]]:
        """The number of a prompt and what has come for it. Not after `is_done`.

        Raises ApiError, also for a sample that ended by a fault or its deadline.
        """
        try:
            place = 0
            if len(self.streams) > 1:
                place = await self._with_news()
            stream = self.streams[place]
            if not stream.has_events:
                await stream.wait()
            return place, self._seen(place, stream.take())
        except FROM_PROCESSES as error:
            raise as_api_error(error) from error

    async def _with_news(self) -> int:
        """The prompt that comes next among those that have news, each in turn."""
        while True:
            for _ in self.streams:
                self._place = (self._place + 1) % len(self.streams)
                if self.streams[self._place].has_news:
                    return self._place
            await Stream.wait_any(self.streams)

    def _seen(self, place: int, events: list[Event]) -> list[Event]:
        metrics, now = self.service.metrics, self.service.clock()
        for event in events:
            key = place * MAX_N + event.index
            written = self._written.get(key)
            if written is None:
                written = self._written[key] = _Written()
            if event.token is not None:
                if written.count:
                    metrics.between_tokens.observe(now - written.last)
                else:
                    self._seen_first(place, event, written, now)
                written.last = now
                written.count += 1
                metrics.generated += 1
            if event.finish is not None:
                self._ended += 1
                self._finished(event.finish, written, now)
                if event.finish == "deadline":
                    raise self.timed_out()
                if event.finish == "error" and event.at_fault:
                    raise invalid(event.error or "the request cannot be answered")
                if event.finish == "error":
                    raise ApiError(500, event.error or "the engine failed on this request")
        return events

    def _seen_first(self, place: int, event: Event, written: "_Written", now: float) -> None:
        metrics, accepted = self.service.metrics, self.streams[place].accepted
        assert accepted is not None
        written.first = now
        metrics.first_token.observe(now - self._began)
        metrics.prefix_queries.inc(accepted.num_prompt)
        metrics.prefix_hits.inc(event.cached)
        if event.index == 0:
            metrics.prompt_tokens_cached.inc(event.cached)
        if event.waits is not None:
            written.prefill = event.waits.prefill
            metrics.queue.observe(event.waits.queue)
            metrics.prefill.observe(event.waits.prefill)

    def _finished(self, reason: str, written: "_Written", now: float) -> None:
        metrics = self.service.metrics
        written.is_over = True
        metrics.finished(reason)
        metrics.answer_sizes.observe(written.count)
        metrics.whole.observe(now - self._began)
        if not written.count:
            return
        decode = written.last - written.first
        metrics.decode.observe(decode)
        metrics.inference.observe(written.prefill + decode)
        if written.count > 1:
            metrics.per_token.observe(decode / (written.count - 1))

    def timed_out(self) -> ApiError:
        limit = self.service.request_seconds
        return ApiError(504, f"the answer took more than {limit:g} s, the most allowed here")

    def close(self) -> None:
        """May be called again."""
        if not self.is_open:
            return
        self.is_open = False
        self.service.num_pending -= self._samples
        self.service.works.discard(self)
        now = self.service.clock()
        for place, stream in enumerate(self.streams):
            was_lost = stream.error is not None and self._end is None
            stream.close()
            if stream.accepted is None:
                continue
            for index in range(self._n):
                written = self._written.get(place * MAX_N + index) or _Written()
                if not written.is_over:
                    self._finished("error" if was_lost else "abort", written, now)

    def tell(self, error: Exception) -> None:
        """End the request with an error, as at the end of a drain."""
        self._end = error
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        for stream in self.streams:
            if stream.num_left:
                stream.close()
                stream.fail(error)


class _Written:
    """The tokens of one sample so far, when the first and the last one came, and the seconds of
    the engine before the first."""

    __slots__ = ("count", "first", "is_over", "last", "prefill")

    def __init__(self) -> None:
        self.count, self.is_over = 0, False
        self.first = self.last = self.prefill = 0.0


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
