"""The engine's process: reads requests from a socket, runs steps, sends what they bring.

Started by client.py as `python -m suzuri.engine.worker FOLDER`; the folder, which nobody else may
enter, has the two sockets. The process ends when its standard input is closed, so that it never
outlives the one that started it. Read `Worker.run` first.
"""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import zmq

from suzuri.engine.chat_stops import ChatStopChecker
from suzuri.engine.engine import Engine, TokenEvent, TokenLogprobs
from suzuri.engine.load import load_engine
from suzuri.engine.messages import (
    FROM_LOADING,
    FROM_RUNNING,
    HEARTBEAT_SECONDS,
    VERSION,
    Abort,
    Accepted,
    Add,
    Event,
    Failed,
    Heartbeat,
    Load,
    Logprobs,
    MediaInput,
    Progress,
    Ready,
    Refused,
    Reply,
    Report,
    Routed,
    Stats,
    Step,
    UpdateWeights,
    Waits,
    encode,
    request_decoder,
)
from suzuri.engine.new_weights import WeightsLost
from suzuri.engine.request import Media, Request, Sequence
from suzuri.engine.warm_up import warm_up
from suzuri.engine.weight_updates import Updates
from suzuri.log import get_logger, start_logging
from suzuri.model.fingerprint import numerics_fingerprint
from suzuri.processing.grammar import Grammar, GrammarCompiler
from suzuri.processing.grammar_request import GrammarSpec
from suzuri.processing.tokenizer import Tokenizer

IDLE_POLL_MS = 1000
THREADS_POLL_MS = 2
"""While something is being made beside the requests."""
COMPILE_SECONDS = 5.0
"""For one grammar."""
COMPILE_QUEUE_SECONDS = 10.0
"""For those before it."""
PROGRESS_SECONDS = 0.2
REQUESTS = "requests.sock"
REPORTS = "reports.sock"

log = get_logger(__name__)


@dataclasses.dataclass
class _Compiling:
    """A request that waits for its grammar: since when, and since when it is being compiled."""

    add: Add
    spec: GrammarSpec
    since: float
    grammar: Future[Grammar] | None = None
    begun: float = 0.0


@dataclasses.dataclass
class _Live:
    """A request in the engine: when it came, its samples that have not ended, whether the prompt's
    log-probs are owed, and what to add again should it begin anew."""

    request: Request
    since: float
    left: int
    owes_prompt: bool
    again: Add | None


class Worker:
    """One engine and its sockets. The heartbeat runs beside the steps, in a thread of its own."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._requests = self._connect(zmq.PULL, folder, REQUESTS)
        self._reports = self._connect(zmq.PUSH, folder, REPORTS)
        self._beats = self._connect(zmq.PUSH, folder, REPORTS)
        self._decoder = request_decoder()
        self._steps = 0
        self._busy = False
        self._is_over = threading.Event()
        self._live: dict[str, _Live] = {}
        """By the engine's id."""
        self._begun: dict[Sequence, float] = {}
        """Since when running sequences run."""
        self._step_began = 0.0
        self._token_bytes: Callable[[int], bytes] = _no_bytes
        self._compiler: GrammarCompiler | None = None
        self._compiling: list[_Compiling] = []
        self._compiled_now: Future[Grammar] | None = None
        self._updates = Updates(self._report)
        self._allows_updates = False
        self._held: list[tuple[Add, Grammar | None, float]] = []
        """Requests that wait for new weights."""

    def _connect(self, kind: int, folder: str, name: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # queues are bounded by the requests that are let in
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"ipc://{folder}/{name}")
        return socket

    def run(self) -> int:
        """Load, then serve until the process is ended. 2 when the model cannot be loaded."""
        load = self._decoder.decode(self._requests.recv())
        try:
            if not isinstance(load, Load) or load.version != VERSION:
                raise ValueError(
                    "the engine's process and the server are of different versions; restart both"
                )
            engine = self._load(load)
        except (ValueError, OSError) as error:
            self._reply(Failed(str(error)))
            self._context.destroy(linger=2000)
            return 2
        beat = threading.Thread(target=self._beat, daemon=True)
        beat.start()
        self._reply(_ready(load, engine))
        try:
            while True:
                self.turn(engine)
        except WeightsLost as error:
            log.error("%s; the engine ends, as it has no whole weights", error)
            self._is_over.set()
            beat.join()
            self._context.destroy(linger=2000)
            return 1

    def _load(self, load: Load) -> Engine:
        last, said = 0.0, ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal last, said
            now = time.monotonic()
            if done == total or what != said or now - last > PROGRESS_SECONDS:
                last, said = now, what
                self._reply(Progress(what, done, total))

        self._reply(Progress("checking that the model fits"))
        tokenizer = Tokenizer()
        engine = load_engine(
            load.model,
            load.config,
            tokenizer,
            random_weights=load.random_weights,
            seed=load.seed,
            device=load.device,
            text_only=load.text_only,
            progress=lambda done, total: report("reading weights", done, total),
            preparing=report,
        )
        self._reply(Progress("warming up"))
        warm_up(engine)
        self._token_bytes = tokenizer.token_bytes
        self._allows_updates = load.allow_updates
        self._compiler = GrammarCompiler(engine.vocabulary, tokenizer.token_bytes)
        return engine

    def turn(self, engine: Engine) -> None:
        """Take what has come, run one step."""
        has_threads = self._compiling or self._updates.is_under_way
        idle = THREADS_POLL_MS if has_threads else IDLE_POLL_MS
        while self._requests.poll(0 if engine.has_work else idle):
            self._take(engine, self._requests.recv())
            idle = 0
        self._add_compiled(engine)
        self._update(engine)
        if not engine.has_work:
            return
        self._busy = True
        counters = engine.scheduler.counters
        computed, admitted = counters.computed_tokens, counters.admissions
        self._step_began = time.monotonic()
        brought = engine.step()
        if counters.admissions != admitted:
            for sequence in engine.scheduler.running:
                self._begun.setdefault(sequence, self._step_began)
        events = [self._event(event) for event in brought if not self._is_set_back(event)]
        self._steps += 1
        computed = counters.computed_tokens - computed
        self._report(Step(events, _stats(engine, self._steps, computed)))
        self._busy = engine.has_work

    def _take(self, engine: Engine, data: bytes) -> None:
        message = self._decoder.decode(data)
        if isinstance(message, Abort):
            self._compiling = [item for item in self._compiling if item.add.id != message.id]
            self._held = [held for held in self._held if held[0].id != message.id]
            engine.abort(str(message.id))
        elif isinstance(message, UpdateWeights):
            self._updates.begin(engine, message)
        elif isinstance(message, Add):
            now = time.monotonic()
            if message.grammar is None:
                self._add(engine, message, None, now)
            else:
                self._compiling.append(_Compiling(message, message.grammar, now))

    def _add_compiled(self, engine: Engine) -> None:
        """Queue the requests whose grammars are there, refuse those whose grammars are none."""
        waiting, self._compiling = self._compiling, []
        for item in waiting:
            grammar = self._submitted(item)
            if grammar is None or not grammar.done():
                if (refused := _too_late(item, time.monotonic())) is None:
                    self._compiling.append(item)
                else:
                    self._report(refused)
            elif (error := grammar.exception()) is None:
                self._add(engine, item.add, grammar.result(), item.since)
            else:
                self._report(Refused(item.add.id, str(error)))

    def _submitted(self, item: _Compiling) -> Future[Grammar] | None:
        """The item's grammar if it is known, or being compiled now: one at a time, so that nothing
        is compiled for a request that has gone meanwhile."""
        assert self._compiler is not None
        if item.grammar is not None:
            return item.grammar
        is_free = self._compiled_now is None or self._compiled_now.done()
        if not is_free and not self._compiler.knows(item.spec):
            return None
        item.grammar, item.begun = self._compiler.submit(item.spec), time.monotonic()
        if is_free:
            self._compiled_now = item.grammar
        return item.grammar

    def _update(self, engine: Engine) -> None:
        """New weights, if there are any; then those who waited for them."""
        again: list[_Live] = []

        def set_back() -> None:
            again.extend(live for live in self._live.values() if live.again is not None)
            for live in again:
                del self._live[live.request.id]
                engine.abort(live.request.id)
                for sequence in live.request.sequences:
                    self._begun.pop(sequence, None)

        if self._updates.is_under_way:
            self._busy = False  # writing may take longer than any step
            self._updates.look(engine, set_back)
        for live in again:
            assert live.again is not None
            self._add(engine, live.again, None, live.since)
        if again:
            events = [Event(int(live.request.id), 0, None, "", restarted=True) for live in again]
            self._report(Step(events, _stats(engine, self._steps, 0)))
        if self._held and not self._updates.holds_requests:
            held, self._held = self._held, []
            for one in held:
                self._add(engine, *one)

    def _is_set_back(self, event: TokenEvent) -> bool:
        """Whether it is of a request that has begun anew since, under the same id."""
        live = self._live.get(event.sequence.request.id)
        return live is None or live.request is not event.sequence.request

    def _add(self, engine: Engine, add: Add, grammar: Grammar | None, since: float) -> None:
        if self._updates.holds_requests:
            self._held.append((add, grammar, since))
            return
        left = None
        if add.deadline is not None:
            left = max(add.deadline - (time.monotonic() - since), 1e-3)
        try:
            request = engine.add(
                str(add.id),
                add.prompt,
                add.params,
                media=_checked_media(engine, add, keeps_inputs=self._allows_updates),
                priority=add.priority,
                deadline=left,
                salt=add.salt,
                grammar=grammar,
            )
        except ValueError as error:
            self._report(Refused(add.id, str(error)))
            return
        if add.chat_stops is not None:
            for sequence in request.sequences:
                sequence.checker = ChatStopChecker(
                    add.params,
                    self._token_bytes,
                    tools=add.chat_stops.tools,
                    eos_token_id=engine.model.config.eos_token_id,
                    limit=sequence.limit - sequence.num_prompt,
                )
        self._busy = True
        self._live[request.id] = _Live(
            *(request, since, add.params.n, add.params.prompt_logprobs is not None),
            again=add if add.may_restart and self._allows_updates else None,
        )
        ids = engine.vocabulary.to_ids(request.prompt) if add.wants_prompt else None
        self._report(Accepted(add.id, len(request.prompt), ids))

    def _event(self, event: TokenEvent) -> Event:
        sequence = event.sequence
        request = sequence.request
        live = self._live[request.id]
        is_first = event.token is not None and len(sequence.tokens) == sequence.num_prompt + 1
        prompt: list[Logprobs] | None = None
        waits: Waits | None = None
        if is_first:
            begun = self._begun.get(sequence, self._step_began)
            waits = Waits(begun - live.since, time.monotonic() - begun)
            if sequence.index == 0 and live.owes_prompt:
                prompt = [_logprobs(record) for record in _records(request)]
        if event.finish is not None:
            self._begun.pop(sequence, None)
            live.left -= 1
            if not live.left:
                del self._live[request.id]
        return Event(
            id=int(request.id),
            index=sequence.index,
            token=event.token,
            text=event.text,
            finish=event.finish,
            stop=sequence.stop if event.finish is not None else None,
            logprobs=None if event.logprobs is None else _logprobs(event.logprobs),
            cached=sequence.num_cached if is_first else 0,
            error=sequence.error,
            prompt_logprobs=prompt,
            waits=waits,
            at_fault=sequence.at_fault,
            version=event.version,
            routed=None if event.finish is None else _routed(sequence),
        )

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            beat = Heartbeat(self._steps, self._busy)
            self._beats.send_multipart([FROM_RUNNING, encode(beat)])

    def _reply(self, message: Reply) -> None:
        self._reports.send_multipart([FROM_LOADING, encode(message)])

    def _report(self, message: Report) -> None:
        self._reports.send_multipart([FROM_RUNNING, encode(message)])


def _no_bytes(id: int) -> bytes:
    raise AssertionError("nothing is loaded")


def _too_late(item: _Compiling, now: float) -> Refused | None:
    """What to say of a grammar that is not there in time, which may be the fault of others."""
    if item.grammar is not None and now - item.begun >= COMPILE_SECONDS:
        why = f"its grammar was not compiled in {COMPILE_SECONDS:g} s; make it simpler"
        return Refused(item.add.id, why)
    if item.grammar is None and now - item.since >= COMPILE_QUEUE_SECONDS:
        return Refused(item.add.id, "other grammars are being compiled", busy=True)
    return None


def _ready(load: Load, engine: Engine) -> Ready:
    model = engine.model
    return Ready(
        version=VERSION,
        model=load.model,
        max_context=engine.capacity.max_context,
        max_running=load.config.max_running,
        config=dataclasses.replace(
            model.config,
            vision=None if model.vision is None else model.config.vision,
            audio=None if model.audio is None else model.config.audio,
        ),
        dtype=load.config.dtype,
        device=load.device,
        weight_version=engine.weight_version,
        fingerprint=numerics_fingerprint(engine.runner.device, load.config.dtype),
    )


def _stats(engine: Engine, steps: int, tokens: int) -> Stats:
    scheduler = engine.scheduler
    pools = [scheduler.pools["global"], scheduler.pools["local"]]
    return Stats(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        steps=steps,
        pages_used=sum(pool.used - pool.spare for pool in pools),
        pages=sum(pool.size - 1 for pool in pools),
        snapshots_used=scheduler.pools["snapshot"].used - scheduler.pools["snapshot"].spare,
        preemptions=scheduler.counters.preemptions,
        step_tokens=tokens,
    )


def _records(request: Request) -> Iterator[TokenLogprobs]:
    yield from request.prompt_logprobs or ()


def _logprobs(found: TokenLogprobs) -> Logprobs:
    return Logprobs(found.raw, found.sampled, found.top)


def _routed(sequence: Sequence) -> Routed | None:
    routing = sequence.routed
    if routing is None:
        return None
    tokens, layers, experts = routing.experts_TLK.shape
    return Routed((tokens, layers, experts), routing.experts_TLK.tobytes())


def _checked_media(engine: Engine, add: Add, *, keeps_inputs: bool) -> list[Media]:
    """Raises ValueError where ids that the model has no row for, and that are spelled with others,
    would move the places of media."""
    if add.media and len(engine.vocabulary.expand(add.prompt)) != len(add.prompt):
        raise ValueError(
            "prompt tokens beside media must be ids that the model has rows for; spell the others "
            "in bytes"
        )
    return [_media(item, keeps_inputs) for item in add.media]


def _media(item: MediaInput, keeps_inputs: bool) -> Media:
    inputs = np.frombuffer(item.data, dtype=item.dtype).reshape(item.shape)
    return Media(
        index=item.index,
        count=item.count,
        kind=item.kind,
        digest=item.digest,
        inputs=inputs.copy(),  # writable, as a tensor is made of it
        keeps_inputs=keeps_inputs,
    )


def _end_with_parent() -> None:
    """Standard input is a pipe from the process that started this one: closed when it is gone."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start_logging()
    sys.exit(Worker(sys.argv[1]).run())
