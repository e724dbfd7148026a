"""What grammars allow next, with a bound on the time that it takes of one step.

A step is everybody's: while it computes masks, nobody gets a token. Cheap ones are part of it, up
to a limit; dear ones are computed on a thread, which the step waits for up to the same limit. What
is not there then comes in a later step, and its sequence runs on from there.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from suzuri.engine.request import Request, Sequence
from suzuri.processing.errors import GrammarError

DEAR_SECONDS: Final = 0.001
"""Of processor time, for one mask. JSON and usual regular expressions take less, most of them far
less."""
STEP_SECONDS: Final = 0.005
"""After this in one step no cheap mask is begun, and a dear one is waited for no more."""

Owed = tuple[Sequence, int]
"""A sequence and the row that was drawn for it."""


class Masks:
    """Sequences that have a new token and no mask yet (Sequence.owes_mask): they do not run.

    A request is taken for a dear one until its first mask is there, and from its first dear mask
    on. `clock`: seconds of processor time of the thread that asks.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._owed: list[Owed] = []
        # One, so that those who ask for much take one processor at most.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._begun: tuple[Sequence, Future[tuple[bytes, float]]] | None = None

    def owe(self, sequence: Sequence, row: int) -> None:
        """Note a token that was drawn."""
        sequence.owes_mask = True
        self._owed.append((sequence, row))

    def work(self, end: Callable[[Sequence], None]) -> None:
        """Compute what is owed, as far as a step allows. `end` is called for a sequence that cannot
        go on, whose `error` is set. (It is not kept: it belongs to who keeps this.)"""
        if not self._owed and self._begun is None:
            return
        limit = time.monotonic() + STEP_SECONDS
        owed = [pair for pair in self._owed if pair[0].finish is None]  # not aborted meanwhile
        cheap = deque(pair for pair in owed if not pair[0].request.has_dear_masks)
        dear = _in_turns([pair for pair in owed if pair[0].request.has_dear_masks])
        self._begin(dear)
        spent = 0.0
        while cheap and spent <= STEP_SECONDS:
            sequence, row = cheap.popleft()
            began = self._clock()
            self._settle(sequence, lambda s=sequence, r=row: self._compute(s.matcher, r), end)
            spent += self._clock() - began
        while self._begun is not None:
            sequence, future = self._begun
            if not wait([future], max(0.0, limit - time.monotonic())).done:
                break
            self._begun = None
            self._settle(sequence, future.result, end)
            self._begin(dear)
        self._owed = [*cheap, *dear]

    def _begin(self, dear: deque[Owed]) -> None:
        """Have the thread compute the next one, unless it has something to do."""
        if dear and self._begun is None:
            sequence, row = dear.popleft()
            self._begun = sequence, self._thread.submit(self._compute, sequence.matcher, row)

    def _compute(self, matcher: Any, row: int) -> tuple[bytes, float]:
        began = self._clock()
        matcher.advance(row)
        return matcher.mask(), self._clock() - began

    def _settle(
        self,
        sequence: Sequence,
        result: Callable[[], tuple[bytes, float]],
        end: Callable[[Sequence], None],
    ) -> None:
        try:
            mask, seconds = result()
        except ValueError as error:
            if sequence.finish is None:
                sequence.error = str(error)
                sequence.at_fault = isinstance(error, GrammarError)
                end(sequence)
            return
        sequence.mask, sequence.owes_mask = mask, False
        is_dear, is_first = seconds > DEAR_SECONDS, len(sequence.tokens) == sequence.num_prompt + 1
        if is_dear or is_first:
            sequence.request.has_dear_masks = is_dear


def _in_turns(owed: list[Owed]) -> deque[Owed]:
    """One sample of each request, then the next of each: many of one do not hold up another."""
    seen: Counter[Request] = Counter()
    turns: list[tuple[int, Owed]] = []
    for pair in owed:
        turns.append((seen[pair[0].request], pair))
        seen[pair[0].request] += 1
    turns.sort(key=lambda turn: turn[0])
    return deque(pair for _, pair in turns)
