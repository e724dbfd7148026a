"""Fills the routing records of sequences that ask for one, a step at a time.

A token that came from the prefix cache did not run for this sequence. So a record goes the way of
the conv inputs: kept with every snapshot, and taken over with it by whoever resumes there. That it
is there is sure, because sequences that ask share prefixes with each other only (engine.py).
"""

# pyright: strict

from collections.abc import Iterable

from suzuri.engine.plan import Plan
from suzuri.engine.routing import Record
from suzuri.engine.transfers import Download


class RoutingRecords:
    """Whose tokens the state in each slot and snapshot belongs to."""

    def __init__(self) -> None:
        self._slots: dict[int, Record] = {}
        self._snapshots: dict[int, Record] = {}

    def take(self, plan: Plan, rows: Download | None) -> None:
        """What a step did, in the runner's order. `rows`: ids and weights of the tokens of all
        works that ask, packed; None when none does."""
        if rows is None and not self._slots and not self._snapshots:
            return
        self._keep(plan.before)
        for snapshot, slot, _ in plan.restores:
            _move(self._snapshots, snapshot, self._slots, slot)
        arrays = rows.arrays() if rows is not None else []
        first = 0
        for work in plan.works:
            record = work.sequence.routing
            if record is None:
                self._slots.pop(work.slot, None)
                continue
            if record.length < work.start:
                record.fill(self._slots[work.slot], work.start)
            end = first + work.count
            experts_TLK, weights_TLJ = (array[first:end] for array in arrays)
            record.put(work.start, experts_TLK, weights_TLJ)
            self._slots[work.slot] = record
            first = end
        self._keep(plan.after)

    def clear(self) -> None:
        """Forgets what snapshots hold, as their weights are gone."""
        self._slots.clear()
        self._snapshots.clear()

    def _keep(self, snapshots: Iterable[tuple[int, int, int]]) -> None:
        for slot, snapshot, _ in snapshots:
            _move(self._slots, slot, self._snapshots, snapshot)


def _move(source: dict[int, Record], key: int, target: dict[int, Record], to: int) -> None:
    """What is at `key` is at `to`, too; with nothing there, nothing."""
    if (record := source.get(key)) is None:
        target.pop(to, None)
    else:
        target[to] = record
