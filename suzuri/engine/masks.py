"""What grammars allow next, with a bound on the work for them in one step.

A step is everybody's: while masks are computed, nobody gets a token. What a usual form costs is
free; of what costs more, only so much is done in one step, and the rest waits for the next one.
"""

import time
from collections.abc import Callable
from typing import Final

from suzuri.engine.request import Request, Sequence
from suzuri.processing.errors import GrammarError

FREE_SECONDS: Final = 0.001
"""Of processor time that a mask may take without being counted. JSON and usual regular expressions
take less, most of them far less."""
REQUEST_SECONDS: Final = 0.05
"""Beyond that, for all masks of one request in one step; it ends there."""
STEP_SECONDS: Final = 0.05
"""Beyond that, for all masks of a step; those that are left come in the next one."""
_TOO_MUCH = "its outputs together take too much work for one token; make it simpler, or lower n"


class Masks:
    """Sequences that have a new token and no mask yet (Sequence.owes_mask): they do not run.

    `clock`: seconds of processor time of this thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._owed: list[tuple[Sequence, int]] = []

    def owe(self, sequence: Sequence, row: int) -> None:
        """Note a token that was drawn."""
        sequence.owes_mask = True
        self._owed.append((sequence, row))

    def work(self, end: Callable[[Sequence], None]) -> None:
        """Compute what is owed, as far as a step allows; first the cheap ones, which so do not wait
        for the others, then in order. `end` is called for a sequence that cannot go on, whose
        `error` is set. (It is not kept: it belongs to who keeps this.)"""
        if not self._owed:
            return
        owed = sorted(self._owed, key=lambda pair: pair[0].request.has_dear_masks)
        spent: dict[Request, float] = {}
        total = 0.0
        place = 0
        while place < len(owed) and total <= STEP_SECONDS:
            sequence, row = owed[place]
            place += 1
            if sequence.finish is not None:
                continue  # aborted meanwhile
            request = sequence.request
            began = self._clock()
            self._advance(sequence, row, end)
            over = max(0.0, self._clock() - began - FREE_SECONDS)
            total += over
            request.has_dear_masks = over > 0
            spent[request] = spent.get(request, 0.0) + over
            if spent[request] > REQUEST_SECONDS and len(request.sequences) > 1:
                self._refuse(request, end)
        self._owed = [pair for pair in owed[place:] if pair[0].finish is None]

    def _advance(self, sequence: Sequence, row: int, end: Callable[[Sequence], None]) -> None:
        try:
            sequence.matcher.advance(row)
            sequence.mask = sequence.matcher.mask()
            sequence.owes_mask = False
        except ValueError as error:
            sequence.error = str(error)
            sequence.at_fault = isinstance(error, GrammarError)
            end(sequence)

    def _refuse(self, request: Request, end: Callable[[Sequence], None]) -> None:
        for sequence in request.sequences:
            if sequence.finish is None:
                sequence.error = f"{sequence.matcher.where}: {_TOO_MUCH}"
                sequence.at_fault = True
                end(sequence)
