"""What a request brought, in the shape that vLLM users know, and how it is put together."""

import dataclasses
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from suzuri.engine.engine import TokenEvent, TokenLogprobs
from suzuri.engine.request import Request
from suzuri.engine.routing import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One id's log-prob at one place. rank: 1 for the most likely; None when it is not among the
    ones that were asked for. decoded_token: None without detokenize."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
"""One entry per token: its own id first, then the most likely ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample.

    finish_reason: "stop", "length", "abort", "deadline" or "error". stop_reason: the stop id or
    string, None for the model's own end of turn. `logprobs` and `cumulative_logprob` are of the
    untouched logits; `sampled_logprobs` of the distribution drawn from. token_ids include the stop
    token, text leaves it out. `routing`, where it was asked for: of the tokens of prompt and sample
    but the last one, which nothing was drawn from.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    sampled_logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routing: Routing | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times in seconds of time.time(); None for what did not happen."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float
    num_generation_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All samples of one prompt, or `error` where the prompt could not be run.

    prompt: its text, None where ids or messages were given. prompt_token_ids: as the model read
    them, so with the byte tokens of words that a small vocabulary lacks. prompt_logprobs: one entry
    per prompt token, None for the first. num_cached_tokens: prompt tokens that the prefix cache
    had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


class OutputBuilder:
    """Collects the events of one request."""

    def __init__(self, request: Request, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self.request = request
        self._prompt, self._ids = prompt, prompt_token_ids
        self._samples = [_Sample(index) for index in range(len(request.sequences))]
        self._arrival = time.time()
        self._first: float | None = None
        self._cached = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self._samples)

    @property
    def num_cached(self) -> int:
        return self._cached

    def add(self, event: TokenEvent) -> bool:
        """Take an event of this request; whether it was the last one."""
        sample = self._samples[event.sequence.index]
        if event.token is not None:
            if self._first is None:
                self._first = time.time()
            if event.sequence.index == 0 and not sample.token_ids:
                self._cached = event.sequence.num_cached
            sample.token_ids.append(event.token)
            if event.logprobs is not None:
                sample.logprobs.append(event.logprobs)
        sample.texts.append(event.text)
        if event.finish is not None:
            sample.finish = event.finish
            sample.stop = event.sequence.stop
            sample.routing = event.sequence.routed
        return all(other.finish is not None for other in self._samples)

    def build(self, decode: Callable[[Many[int]], str]) -> RequestOutput:
        """The finished output. `decode` spells ids (Tokenizer.decode)."""
        params = self.request.sampling.params
        spell = decode if params.detokenize else None
        errors = [s.error for s in self.request.sequences if s.error is not None]
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            prompt_logprobs=self._prompt_logprobs(spell),
            outputs=[
                sample.build(spell, raw=params.logprobs is not None, drawn=params.sampled_logprobs)
                for sample in self._samples
            ],
            num_cached_tokens=self._cached,
            metrics=RequestMetrics(
                arrival_time=self._arrival,
                first_token_time=self._first,
                finished_time=time.time(),
                num_generation_tokens=self.num_tokens,
            ),
            error=errors[0] if errors else None,
        )

    def _prompt_logprobs(
        self, spell: Callable[[Many[int]], str] | None
    ) -> list[dict[int, Logprob] | None] | None:
        records = self.request.prompt_logprobs
        if records is None:
            return None
        found: list[dict[int, Logprob] | None] = [None]
        for id, record in zip(self._ids[1:], records, strict=False):  # fewer after an abort
            found.append(_entry(id, record.raw, record.top, spell))
        return found


class _Sample:
    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: str | None = None
        self.stop: int | str | None = None
        self.routing: Routing | None = None

    def build(
        self, spell: Callable[[Many[int]], str] | None, *, raw: bool, drawn: bool
    ) -> CompletionOutput:
        records = list(zip(self.token_ids, self.logprobs, strict=True)) if raw or drawn else []
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=sum(r.raw or 0.0 for _, r in records) if raw else None,
            logprobs=[_entry(id, r.raw, r.top, spell) for id, r in records] if raw else None,
            sampled_logprobs=(
                [_entry(id, r.sampled, r.top_sampled, spell) for id, r in records]
                if drawn
                else None
            ),
            finish_reason=self.finish,
            stop_reason=self.stop,
            routing=self.routing,
        )


def _entry(
    id: int,
    own: float | None,
    top: tuple[tuple[int, float], ...],
    spell: Callable[[Many[int]], str] | None,
) -> dict[int, Logprob]:
    ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
    possible = {other: value for other, value in top if value > -math.inf}
    values = ({} if own is None else {id: own}) | possible
    return {
        other: Logprob(
            logprob=value,
            rank=ranks.get(other),
            decoded_token=None if spell is None else spell([other]),
        )
        for other, value in values.items()
    }
