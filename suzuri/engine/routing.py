"""The experts that a sequence's tokens went to, recorded when a request asks. No torch here.

Read next: routing_records.py, which fills records step by step.
"""

# pyright: strict

from typing import NamedTuple

import numpy as np

from suzuri.types import Array

MOST_EXPERTS = 256
"""An id takes one byte."""


class Routing(NamedTuple):
    """Per token and layer with experts: the ids chosen, in slot order (rising), uint8 [T, L, K];
    and the weights with which they were added up, fp32 (at least) [T, L, J], of these and then of
    the shared experts."""

    experts_TLK: Array
    weights_TLJ: Array


class Record:
    """Routing of one sequence from its first token on; grows as steps are committed.

    `num_slots`: those of `num_chosen` and of the shared experts.
    """

    def __init__(self, num_layers: int, num_chosen: int, num_slots: int) -> None:
        self.length = 0
        """Tokens that are known."""
        self._kept = 0
        self._experts_TLK = np.zeros((0, num_layers, num_chosen), np.uint8)
        self._weights_TLJ = np.zeros((0, num_layers, num_slots), np.float32)

    def put(self, start: int, experts_TLK: Array, weights_TLJ: Array) -> None:
        """Rows from token `start` on; those before were put already, and may be put again."""
        assert start <= self.length, f"rows from {start} on, and {self.length} are known"
        end = start + len(experts_TLK)
        first = min(max(start, self._kept), end)
        experts_TLK, weights_TLJ = experts_TLK[first - start :], weights_TLJ[first - start :]
        if end > len(self._experts_TLK):
            room = max(end, 2 * self.length)
            self._experts_TLK = _grown(self._experts_TLK, experts_TLK, room)
            self._weights_TLJ = _grown(self._weights_TLJ, weights_TLJ, room)
        self._experts_TLK[first:end] = experts_TLK
        self._weights_TLJ[first:end] = weights_TLJ
        self.length = max(self.length, end)

    def fill(self, other: "Record", count: int) -> None:
        """Takes what is missing of the first `count` tokens from a record of the same tokens."""
        if self.length < count:
            assert other.length >= count, f"{count} rows are needed, {other.length} are known"
            missing = slice(self.length, count)
            self.put(self.length, other._experts_TLK[missing], other._weights_TLJ[missing])

    def keep(self, has_drawn: bool) -> None:
        """New weights come. Rows from which tokens were drawn stay what they were then, though they
        run again; without any it begins anew."""
        self.length = self._kept = self.length if has_drawn else 0

    def first(self, count: int) -> Routing:
        """Of the first `count` tokens, or of as many as are known. A copy."""
        known = slice(0, min(count, self.length))
        return Routing(self._experts_TLK[known].copy(), self._weights_TLJ[known].copy())


def _grown(old: Array, new: Array, room: int) -> Array:
    found = np.empty((room, *new.shape[1:]), new.dtype)
    found[: len(old)] = old
    return found
