"""One model serving many requests: `Engine.step` schedules, launches, and commits the step before.

An engine is used from one thread. Requests are checked here, at its edge; inside, everything is
model rows.
"""

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from typing import Protocol

from suzuri.engine.capacity import Capacity, capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.masks import Masks
from suzuri.engine.pages import Pool
from suzuri.engine.prefix_cache import PrefixCache
from suzuri.engine.request import Media, Request, Sequence, Status
from suzuri.engine.routing import MOST_EXPERTS, Record
from suzuri.engine.routing_records import RoutingRecords
from suzuri.engine.runner import Launched, Runner
from suzuri.engine.sampling_params import SamplingParams, resolve
from suzuri.engine.scheduler import Scheduler, Shape
from suzuri.engine.stopping import StopChecker
from suzuri.engine.transfers import Download
from suzuri.log import get_logger
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import Vocabulary

log = get_logger(__name__)

MEDIA_KEY = 1 << 40
"""Cache keys of media tokens are from here on; those of text are model rows."""


class Matcher(Protocol):
    """One output on its way through a grammar, in model rows; processing/grammar.py has one.

    `mask`: a bit per row that may come next. `where`: the field of the request. Both raise
    GrammarError when it cannot go on, ValueError for a row that it does not allow.
    """

    where: str

    def mask(self) -> bytes: ...

    def advance(self, row: int) -> None: ...


class Grammar(Protocol):
    """What outputs may be; any number of them follow it at one time."""

    def matcher(self) -> Matcher: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What a step brought for one sequence: at most one new token, and its end if it ended.

    `token` and all ids are the tokenizer's. `text` may be shown now, for good; it may come later
    than its tokens. `finish`: None, "stop", "length", "abort", "deadline" or "error"; what stopped
    it is sequence.stop, what went wrong sequence.error. `version`: of the weights that drew it.
    """

    sequence: Sequence
    token: int | None
    text: str
    logprobs: "TokenLogprobs | None"
    finish: str | None
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-prob of the drawn token, raw and under the distribution drawn from, and the top ones."""

    raw: float | None
    sampled: float | None
    top: tuple[tuple[int, float], ...]
    top_sampled: tuple[tuple[int, float], ...]


class Engine:
    """Continuous batching over one model.

    `memory_bytes` bounds everything that the engine allocates (weights included); pools are sized
    by capacity.py. `token_bytes` (Tokenizer.token_bytes) turns ids into text; without it events
    carry none and stop strings are refused. `runner`: another one (simulations). Raises ValueError,
    with the sum, when the model does not fit.
    """

    def __init__(
        self,
        model: Inkling,
        config: EngineConfig,
        *,
        memory_bytes: int,
        vocabulary: Vocabulary,
        token_bytes: Callable[[int], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        runner: Runner | None = None,
    ) -> None:
        self.config, self.model, self.vocabulary = config, model, vocabulary
        self._token_bytes = token_bytes
        # A runner that is given brings pools, and records what it records.
        on_gpu = runner is None and model.decoder.norm.weight.device.type == "cuda"
        self.capacity: Capacity = capacity(model.config, config, memory_bytes, on_gpu=on_gpu)
        self.runner = runner or Runner(model, config, self.capacity)
        text = model.config.text
        attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
        window = max((a.window or 0 for a in attentions), default=0)
        pools = {
            "global": Pool("global", self.capacity.global_pages),
            "local": Pool("local", self.capacity.local_pages),
            "snapshot": Pool("snapshot", self.capacity.snapshots),
        }
        self.cache = PrefixCache(
            pools,
            page_size=config.page_size,
            window=window,
            max_path_tokens=config.max_path_tokens,
            min_branch_gain=config.min_branch_gain,
        )
        shape = Shape(
            window=window,
            has_global=any(not a.is_local for a in attentions),
        )
        self.scheduler = Scheduler(config, shape, pools, self.cache)
        self.weight_version = 0
        self._requests: dict[str, Request] = {}
        self._pending: Launched | None = None
        self._events: collections.deque[TokenEvent] = collections.deque()
        self._clock = clock
        self._masks = Masks()
        self._routing = RoutingRecords()

    # Requests

    def add(
        self,
        id: str,
        prompt: Many[int],
        params: SamplingParams,
        *,
        media: Many[Media] = (),
        priority: int = 0,
        deadline: float | None = None,
        salt: Hashable = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a request; prompt holds tokenizer ids. Raises ValueError for that request alone.

        `deadline` in seconds from now; `salt` keeps its cached prefixes apart from those of others;
        every sample follows the `grammar`.
        """
        request = self._checked(id, prompt, params, media, priority, deadline, salt)
        if grammar is not None:
            mask = grammar.matcher().mask()  # the same for all
            for sequence in request.sequences:
                sequence.matcher, sequence.mask = grammar.matcher(), mask
        self._requests[id] = request
        self.scheduler.add(request)
        return request

    def _checked(
        self,
        id: str,
        prompt: Many[int],
        params: SamplingParams,
        media: Many[Media],
        priority: int,
        deadline: float | None,
        salt: Hashable,
    ) -> Request:
        if type(id) is not str or not id:
            raise ValueError(f"request id {id!r}: must be a string that is not empty")
        try:
            hash(salt)
        except TypeError as error:
            raise ValueError(f"salt = {salt!r}: must be hashable, such as a string") from error
        if id in self._requests:
            raise ValueError(f"request id {id!r} is in use; give each request its own")
        if type(priority) is not int or abs(priority) > 10**6:
            raise ValueError(f"priority = {priority!r}: must be an integer up to 1000000")
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline = {deadline!r}: must be a positive number of seconds")
        if self.scheduler.num_waiting + params.n > self.config.max_waiting:
            raise ValueError(
                f"{self.scheduler.num_waiting} sequences wait already; at most "
                f"{self.config.max_waiting} may (max_waiting)"
            )
        rows = self._rows(prompt)
        most = self.capacity.max_context
        if len(rows) >= most:
            raise ValueError(
                f"the prompt has {len(rows)} tokens; with at least one token of answer at most "
                f"{most - 1} fit (max_context = {most})"
            )
        if params.max_tokens is not None and len(rows) + params.max_tokens > most:
            raise ValueError(
                f"prompt ({len(rows)} tokens) and max_tokens = {params.max_tokens} are more than "
                f"max_context = {most}; lower max_tokens to {most - len(rows)} or give None"
            )
        sampling = resolve(
            params,
            self.vocabulary,
            num_rows=self.model.config.text.unpadded_vocab_size,
            eos_token_id=self.model.config.eos_token_id,
        )
        keys = _keys(rows, media)
        limit = most if params.max_tokens is None else len(rows) + params.max_tokens
        shared = self.config.prefix_cache
        # What asks for its routing resumes only where that of the tokens before is known.
        root = (self.weight_version, salt if shared else (id, "alone"), params.routing)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        request = Request(
            id=id,
            prompt=rows,
            keys=keys,
            sampling=sampling,
            root=root,
            priority=priority,
            deadline=None if deadline is None else self._clock() + deadline,
            media=list(media),
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            prefix_cache=shared or params.n > 1,
            group=(len(keys), hash(tuple(keys))),
        )
        for index in range(params.n):
            sequence = Sequence(request, index, limit=limit, seed=seed, order=0)
            sequence.checker = self._checker(params, limit - len(rows))
            sequence.routing = self._record() if params.routing else None
            request.sequences.append(sequence)
        return request

    def _record(self) -> Record:
        text = self.model.config.text
        if not text.num_moe_layers:
            raise ValueError("routing: this model has no routed experts; leave it out")
        if text.n_routed_experts > MOST_EXPERTS:
            raise ValueError(
                f"routing: this model has {text.n_routed_experts} routed experts, and ids are "
                f"recorded for at most {MOST_EXPERTS}, a byte each; leave it out"
            )
        chosen = text.num_experts_per_tok
        return Record(text.num_moe_layers, chosen, chosen + text.n_shared_experts)

    def _checker(self, params: SamplingParams, most: int) -> StopChecker:
        if self._token_bytes is None:
            if params.stop_strings:
                raise ValueError("stop strings need the tokenizer, and this engine has none")
            params = dataclasses.replace(params, detokenize=False)
        eos = self.model.config.eos_token_id
        return StopChecker(params, self._token_bytes, eos_token_id=eos, limit=most)

    def _rows(self, prompt: Many[int]) -> list[int]:
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; give at least one token")
        if set(map(type, prompt)) != {int}:  # no pass in Python over a prompt that is sound
            wrong = next(token for token in prompt if type(token) is not int)
            raise ValueError(f"prompt token {wrong!r} is not an integer")
        rows = self.vocabulary.spelled_rows(prompt)
        rows_there = self.model.config.text.unpadded_vocab_size
        if self.vocabulary.num_rows > rows_there and max(rows) >= rows_there:
            outside = next(row for row in rows if row >= rows_there)
            raise ValueError(
                f"prompt token {outside} is outside this model's vocabulary of {rows_there}"
            )
        return rows

    def abort(self, id: str) -> bool:
        """End a request now, wherever it is; False when there is no such request."""
        request = self._requests.get(id)
        if request is None:
            return False
        for sequence in request.sequences:
            self._end(sequence, "abort")
        return True

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do or bring anything."""
        return self.scheduler.has_work or self._pending is not None or bool(self._events)

    def step(self) -> list[TokenEvent]:
        """Plan and launch one step, then commit the one launched before; what that brought."""
        for sequence in self.scheduler.expired(self._clock()):
            self._end(sequence, "deadline")
        launched = self.runner.execute(self.scheduler.schedule())
        if self.config.overlap:
            launched, self._pending = self._pending, launched
        if launched is not None:
            self._commit(launched)
        if self._pending is not None and not self.scheduler.has_work:
            self._commit(self._pending)  # nothing else to overlap with
            self._pending = None
        self._masks.work(lambda sequence: self._end(sequence, "error"))
        events = list(self._events)
        self._events.clear()
        return events

    def run(self) -> list[TokenEvent]:
        """Steps until nothing is left to do."""
        events: list[TokenEvent] = []
        while self.has_work:
            events += self.step()
        return events

    def update_weights(self, update: Callable[[], None], version: int | None = None) -> int:
        """Let `update` change the model's weights in place, between two steps; returns the new
        `version` (None: the next one). What was cached under the old ones is forgotten.

        Requests go on from where they are: the new weights read again what the old ones read and
        drew. Pictures and clips of theirs must have been added with `keeps_inputs`.
        """
        if self._pending is not None:
            self._commit(self._pending)  # drawn by the old weights
            self._pending = None
        for sequence in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(sequence)
        self.cache.clear()
        self._routing.clear()
        self.weight_version = self.weight_version + 1 if version is None else version
        for request in self._requests.values():
            self._begin_anew(request)
        update()
        return self.weight_version

    def _begin_anew(self, request: Request) -> None:
        """Let go of what the old weights made of it, but for the tokens that they drew."""
        request.root = (self.weight_version, *request.root[1:])
        for item in request.media:
            assert item.inputs is not None, "the inputs of media are gone; keep them"
            item.features = None
        if request.sampling.params.routing:
            request.prefix_cache = False  # of tokens that the old weights ran, theirs is kept
            for sequence in request.sequences:
                if sequence.routing is not None:
                    sequence.routing.keep(len(sequence.tokens) > sequence.num_prompt)
        first = request.sequences[0]
        if request.prompt_logprobs is not None and len(first.tokens) == first.num_prompt:
            request.prompt_logprobs.clear()
            first.recomputed = 0

    def _commit(self, launched: Launched) -> None:
        """Take note of a step's results: the only place where the host waits for the device."""
        if launched.plan is not None:
            self._routing.take(launched.plan, launched.routing)
        for work, rows in launched.prompts:
            records = work.sequence.request.prompt_logprobs
            if records is not None and work.sequence.status is not Status.FINISHED:
                records.extend(_prompt_records(rows, self.vocabulary))
        if launched.ids is None:
            return
        drawn = _Drawn(launched, self.vocabulary)
        for i, work in enumerate(launched.sampling):
            sequence = work.sequence
            if sequence.status is Status.FINISHED:
                continue  # one token too many, or aborted meanwhile
            sequence.in_flight -= 1
            token = drawn.ids[i]
            if token < 0:
                sequence.error = "no token could be drawn: every one is masked, or logits are NaN"
                self._end(sequence, "error")
                continue
            sequence.tokens.append(token)
            self._judge(sequence, token, drawn.logprobs(i, sequence.request.sampling.params))
            if sequence.matcher is not None and sequence.finish is None:
                self._masks.owe(sequence, token)

    def _judge(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Report a new token, and end the sequence where it stops."""
        (id,) = self.vocabulary.to_ids([token])
        text, stop, _ = sequence.checker.push([id])
        if stop is not None:
            sequence.finish, sequence.stop = stop.reason, stop.matched
            self.scheduler.finish(sequence, keep=True)
            self._forget(sequence)
        self._events.append(
            TokenEvent(
                sequence=sequence,
                token=id,
                text=text,
                logprobs=logprobs,
                finish=sequence.finish,
                version=self.weight_version,
            )
        )

    def _end(self, sequence: Sequence, finish: str) -> None:
        if sequence.status is Status.FINISHED:
            return
        sequence.finish = finish
        self.scheduler.finish(sequence, keep=False)
        self._forget(sequence)
        text = sequence.checker.finish()
        self._events.append(
            TokenEvent(
                sequence=sequence,
                token=None,
                text=text,
                logprobs=None,
                finish=finish,
                version=self.weight_version,
            )
        )

    def _forget(self, sequence: Sequence) -> None:
        request = sequence.request
        if all(other.status is Status.FINISHED for other in request.sequences):
            self._requests.pop(request.id, None)
            if not self.config.prefix_cache:
                self.cache.clear(request.root)

    def check(self) -> None:
        """All invariants of pools, queues and the prefix cache (AssertionError)."""
        self.scheduler.check()


def _keys(rows: list[int], media: Many[Media]) -> list[int]:
    """Names of the prompt's tokens for the prefix cache: content, not placeholders, for media."""
    keys = list(rows)
    for item in media:
        start = int.from_bytes(item.digest[:7], "big") << 20
        for i in range(item.count):
            keys[item.index + i] = MEDIA_KEY + start + i
    return keys


def _prompt_records(scores: Download, vocabulary: Vocabulary) -> list[TokenLogprobs]:
    """The raw log-prob of each prompt token, and its alternatives."""
    host = _HostScores(scores, vocabulary)
    return [host.record(i, None, None) for i in range(len(host.own))]


class _HostScores:
    """Scores as Python numbers, ids as the tokenizer's."""

    own: list[float]
    _ids: list[list[int]]
    _values: list[list[float]]

    def __init__(self, scores: Download, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.own, self._ids, self._values = scores.lists()

    def top(self, i: int, count: int | None) -> tuple[tuple[int, float], ...]:
        pairs = zip(self._ids[i][:count], self._values[i][:count], strict=True)
        found = [(row, value) for row, value in pairs if row >= 0]
        ids = self._vocabulary.to_ids([row for row, _ in found])
        return tuple(zip(ids, (value for _, value in found), strict=True))

    def record(self, i: int, count: int | None, sampled: "_HostScores | None") -> TokenLogprobs:
        return TokenLogprobs(
            raw=self.own[i],
            top=self.top(i, count),
            sampled=None if sampled is None else sampled.own[i],
            top_sampled=() if sampled is None else sampled.top(i, count),
        )


class _Drawn:
    """A step's samples on the host."""

    def __init__(self, launched: Launched, vocabulary: Vocabulary) -> None:
        assert launched.ids is not None
        self.ids: list[int] = launched.ids.lists()[0]
        raw, under = launched.raw, launched.sampled
        self._raw = None if raw is None else _HostScores(raw, vocabulary)
        self._sampled = None if under is None else _HostScores(under, vocabulary)

    def logprobs(self, i: int, params: SamplingParams) -> TokenLogprobs | None:
        """What row i asked for; None when nothing."""
        sampled = self._sampled if params.sampled_logprobs else None
        if params.logprobs is not None and self._raw is not None:
            return self._raw.record(i, params.logprobs, sampled)
        if sampled is None:
            return None
        return TokenLogprobs(raw=None, top=(), sampled=sampled.own[i], top_sampled=())
