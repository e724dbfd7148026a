"""An engine in a process of its own, from an asyncio program: requests go in, events come out.

`EngineClient` starts the process, watches it, tells every waiting request when it dies or hangs,
and starts it again. No torch here. The other side: worker.py; the words between: messages.py.
"""

# pyright: strict

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from suzuri.engine.messages import (
    FROM_RUNNING,
    HEARTBEAT_SECONDS,
    VERSION,
    Abort,
    Accepted,
    Add,
    ChatStops,
    Event,
    Failed,
    Heartbeat,
    Load,
    MediaInput,
    OnPublish,
    Progress,
    Ready,
    Refused,
    Report,
    Stats,
    Step,
    UpdateRefused,
    UpdateWeights,
    WeightsUpdated,
    encode,
    reply_decoder,
    report_decoder,
)
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stream import EngineUnavailable, RequestRefused, Stream
from suzuri.log import get_logger
from suzuri.processing.grammar_request import GrammarSpec

WORKER = "suzuri.engine.worker"
REQUESTS = "requests.sock"
REPORTS = "reports.sock"
MOST_RESTARTS = 5
"""Starts that may fail one after the other before the engine is given up."""
LONGEST_PAUSE = 30.0

log = get_logger(__name__)


class UpdateFailed(Exception):
    """New weights were refused; `kind` as in UpdateRefused."""

    def __init__(self, refused: UpdateRefused) -> None:
        super().__init__(refused.error)
        self.kind = refused.kind


class EngineClient:
    """One engine process at a time, supervised.

    `silent_seconds`: without a heartbeat for so long, a process that has loaded counts as dead.
    `stuck_seconds`: so long may one step take; it is then killed. `on_progress` is called while the
    engine loads. `worker` is the module that is the engine's process. Everything runs in the event
    loop that called `start`.
    """

    def __init__(
        self,
        load: Load,
        *,
        silent_seconds: float = 1.75,
        stuck_seconds: float = 120.0,
        on_progress: Callable[[Progress], None] | None = None,
        worker: str = WORKER,
    ) -> None:
        self._load, self._worker = load, worker
        self._silent, self._stuck = silent_seconds, stuck_seconds
        self._on_progress = on_progress
        self.ready: Ready | None = None
        """What serves now; None while nothing does."""
        self.why_not_ready = "the engine is loading"
        self.stats = Stats()
        self.num_restarts = 0
        self.pid: int | None = None
        self._streams: dict[int, Stream] = {}
        self._updates: dict[int, asyncio.Future[WeightsUpdated]] = {}
        self._next_id = 0
        self._socket: Any = None
        """Where requests are sent, without waiting."""
        self._up: asyncio.Event = asyncio.Event()
        self._failure: str | None = None
        self._last_beat = self._last_step = time.monotonic()
        self._steps: int = -1
        self._task: asyncio.Task[None] | None = None
        self.given_up: asyncio.Event = asyncio.Event()
        """Set when the engine cannot be started again."""
        self.on_step: Callable[[Stats], None] | None = None
        """Called with the stats of every step."""

    # Life

    async def start(self) -> Ready:
        """Start the process and wait until it serves.

        Raises ValueError with the fix when the model cannot be loaded; no weight has been read when
        it does not fit.
        """
        self._task = asyncio.create_task(self._supervise())
        up = asyncio.create_task(self._up.wait())
        given_up = asyncio.create_task(self.given_up.wait())
        try:
            await asyncio.wait({up, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            given_up.cancel()
        if self.ready is None:
            raise ValueError(self._failure or self.why_not_ready)
        return self.ready

    async def close(self) -> None:
        """End the process; whoever still waits is told."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _supervise(self) -> None:
        failures = 0
        try:
            while True:
                self.why_not_ready = await self._one_life()
                was_up = self._lost(EngineUnavailable(self.why_not_ready))
                failures = 0 if was_up else failures + 1
                if not self._up.is_set() or failures >= MOST_RESTARTS:
                    self._failure = self._failure or self.why_not_ready
                    return
                self.num_restarts += 1
                pause = min(LONGEST_PAUSE, 0.1 * 4**failures)
                log.warning("%s; starting it again in %.1f s", self.why_not_ready, pause)
                await asyncio.sleep(pause)
        finally:
            self._lost(EngineUnavailable("the server is shutting down"))
            self.given_up.set()

    def _lost(self, error: EngineUnavailable) -> bool:
        """Turn readiness off and tell everybody; whether the engine had been up."""
        was_up, self.ready, self._socket, self.pid = self.ready is not None, None, None, None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for update in self._updates.values():
            if not update.done():
                update.set_exception(error)
        self.stats = Stats()
        return was_up

    async def _one_life(self) -> str:
        """Start one process and follow it to its end; why it ended."""
        folder = tempfile.mkdtemp(prefix="suzuri-")  # for its owner alone: mode 0700
        context = zmq.asyncio.Context()
        process: Process | None = None
        tasks: set[asyncio.Task[str]] = set()
        try:
            requests, reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            for socket, name in ((requests, REQUESTS), (reports, REPORTS)):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(f"ipc://{folder}/{name}")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._worker, folder),
                stdin=PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which drains first
            )
            self.pid = process.pid
            tasks = {
                asyncio.create_task(self._ended(process)),
                asyncio.create_task(self._read(requests, reports)),
                asyncio.create_task(self._watch()),
            }
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is None:
                return next(iter(done)).result()
            return self._failure
        except msgspec.MsgspecError as error:
            return f"the engine's process said what nobody understands ({error})"
        finally:
            for task in tasks:
                task.cancel()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*tasks, return_exceptions=True)
            if process is not None:
                await process.wait()
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)

    async def _ended(self, process: Process) -> str:
        code = await process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self.ready is None:
            # Give what it said last a moment to arrive.
            await asyncio.sleep(0.2)
            return self._failure or f"the engine's process ended while loading ({how})"
        return f"the engine's process ended ({how})"

    async def _watch(self) -> str:
        """Ends when the engine gives no sign of life, or does not get on."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            if now - checked > 4 * HEARTBEAT_SECONDS:
                self._last_beat = now  # this loop was held up itself and has read nothing
            checked = now
            if self.ready is None:
                continue
            if now - self._last_beat > self._silent - HEARTBEAT_SECONDS:
                return f"the engine has given no sign of life for {self._silent:g} s"
            if now - self._last_step > self._stuck:
                return f"the engine has been within one step for {self._stuck:g} s"

    # What comes

    async def _read(self, requests: zmq.asyncio.Socket, reports: zmq.asyncio.Socket) -> str:
        await requests.send(encode(self._load))  # once the other side is there
        self._socket = zmq.Socket.shadow(requests)  # pyright: ignore[reportUnknownMemberType]
        decode_reply, decode_report = reply_decoder().decode, report_decoder().decode
        while True:
            kind, data = await reports.recv_multipart()
            if kind == FROM_RUNNING:
                self._take(decode_report(data))
                await asyncio.sleep(0)  # while more is there, receiving does not wait
                continue
            match decode_reply(data):
                case Failed(error):
                    self._failure = error if not self._up.is_set() else None
                    return error
                case Ready() as ready:
                    if ready.version != VERSION:
                        return "the engine's process is of another version; restart the server"
                    self._last_beat = self._last_step = time.monotonic()
                    self._steps = -1
                    self.ready, self.why_not_ready = ready, ""
                    self._up.set()
                case Progress() as progress:
                    if self._on_progress is not None:
                        self._on_progress(progress)

    def _take(self, report: Report) -> None:
        match report:
            case Step(events, stats):
                self._last_beat = self._last_step = time.monotonic()
                self.stats = stats
                if self.on_step is not None:
                    self.on_step(stats)
                for event in events:
                    self._give(event)
            case Accepted():
                if (stream := self._streams.get(report.id)) is not None:
                    stream.accept(report)
            case Refused(id, error, busy):
                if (stream := self._streams.pop(id, None)) is not None:
                    stream.fail(EngineUnavailable(error) if busy else RequestRefused(error))
            case WeightsUpdated():
                if self.ready is not None:
                    self.ready = msgspec.structs.replace(
                        self.ready,
                        weight_version=report.version,
                        content_hash=report.content_hash,
                    )
                self._last_step = time.monotonic()
                if (update := self._updates.get(report.id)) is not None and not update.done():
                    update.set_result(report)
            case UpdateRefused():
                if (update := self._updates.get(report.id)) is not None and not update.done():
                    update.set_exception(UpdateFailed(report))
            case Heartbeat():
                self._last_beat = time.monotonic()
                if report.steps != self._steps or not report.busy:
                    self._steps, self._last_step = report.steps, self._last_beat

    def _give(self, event: Event) -> None:
        stream = self._streams.get(event.id)
        if stream is None:
            return  # closed meanwhile
        stream.push(event)
        if not stream.num_left:
            self._streams.pop(event.id, None)

    # Requests

    @property
    def num_pending(self) -> int:
        """Samples that wait or run."""
        return sum(stream.num_left for stream in self._streams.values())

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
        """Send a request. Raises EngineUnavailable when nothing serves now.

        Lower `priority` runs earlier; `deadline` in seconds from now; `salt` keeps its cached
        prefixes apart; every sample follows the `grammar`; the last two as in Add. What `encode`
        raises for texts and integers that cannot be sent is a UnicodeEncodeError or an
        OverflowError.
        """
        if self.ready is None or self._socket is None:
            raise EngineUnavailable(self.why_not_ready)
        self._next_id += 1
        id = self._next_id
        add = Add(
            id=id,
            prompt=list(prompt),
            params=params,
            media=list(media),
            priority=priority,
            deadline=deadline,
            salt=salt,
            wants_prompt=wants_prompt,
            grammar=grammar,
            chat_stops=chat_stops,
            may_restart=may_restart,
        )
        data = encode(add)  # before anything is kept: it may raise for texts and integers
        if not self._send(data):
            raise EngineUnavailable("the engine's process has ended")
        stream = self._streams[id] = Stream(id, params.n, self._abort)
        return stream

    async def update_weights(
        self,
        folder: str,
        *,
        version: int | None = None,
        content_hash: str | None = None,
        replaces: int | None = None,
        on_publish: OnPublish = "finish",
    ) -> WeightsUpdated:
        """Let the engine take over the weights of a folder; arguments as in UpdateWeights. Once it
        has begun it goes on, whether or not anybody waits.

        Raises UpdateFailed, or EngineUnavailable when the engine ends first.
        """
        if self.ready is None:
            raise EngineUnavailable(self.why_not_ready)
        self._next_id += 1
        asked = UpdateWeights(
            id=self._next_id,
            folder=folder,
            version=version,
            content_hash=content_hash,
            replaces=replaces,
            on_publish=on_publish,
        )
        data = encode(asked)
        told = self._updates[asked.id] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(data):
                raise EngineUnavailable("the engine's process has ended")
            return await told
        finally:
            del self._updates[asked.id]

    def _abort(self, id: int) -> None:
        if self._streams.pop(id, None) is not None:
            self._send(encode(Abort(id)))

    def _send(self, data: bytes) -> bool:
        """False when nobody is there: a process that has ended, before `_ended` tells."""
        if self._socket is None:
            return False
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def kill(self) -> None:
        """End the process at once, as a crash would (tests, operators); it is started again."""
        if self.pid is not None:
            os.kill(self.pid, 9)
