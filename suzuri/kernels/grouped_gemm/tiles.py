"""Which tiles a grouped product takes: those of the nearest size that was measured (tiles.json, by
scripts/reproduce/tune_moe.py), or by rule where nothing near was. No bit depends on it."""

import json
from functools import cache, lru_cache
from math import log2
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch

from suzuri.kernels.matmul.kernel import Tile

Kind = Literal["gate_up", "gathered", "down"]
"""With SwiGLU over sorted rows, with SwiGLU over rows that are not sorted, or plain."""
TABLE = Path(__file__).with_name("tiles.json")
NEAR = 1.0
"""log2 of how far the number of experts or K may be from a measured one, summed."""


HALVED_BELOW = 640
"""Rows of an expert below which its last tile is one of few, and half of it worth saving."""


class Schedule(NamedTuple):
    """How a grouped product is cut up and in what order."""

    tile: Tile
    group: int = 8
    """Row tiles of an expert whose columns are walked together."""
    persistent: bool = False
    """One program per multiprocessor walks over the tiles (by descriptors, not swapped)."""
    halved: bool = False
    """An expert's last tile has half the rows where it has no more (by descriptors, of sorted rows,
    not swapped, not persistent)."""
    spread: bool = False
    """The tiles of shared experts lie evenly among the others' (not persistent)."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """KeyError for one that lacks a field."""
        tile = Tile(**{name: values[name] for name in Tile._fields})
        return cls(tile, **{name: values[name] for name in cls._fields[1:]})

    def as_json(self) -> dict[str, Any]:
        fields = self._asdict()
        return {**fields.pop("tile")._asdict(), **fields}


class Entry(NamedTuple):
    """The best of a measured size."""

    kind: str
    experts: int
    k: int
    mean: float
    """Rows of an expert."""
    schedule: Schedule


def read(text: str) -> tuple[Entry, ...]:
    """The entries of a table; ValueError, KeyError or TypeError where it is none."""
    found: list[Entry] = []
    for row in json.loads(text)["entries"]:
        schedule = Schedule.of_json(row["schedule"])
        found.append(Entry(row["kind"], row["experts"], row["k"], row["mean"], schedule))
    return tuple(found)


@cache
def table() -> tuple[Entry, ...]:
    """What is shipped, of bf16 on an H200."""
    return read(TABLE.read_text("utf-8"))


@lru_cache(1 << 14)
def schedule_for(
    rows: int, experts: int, k: int, dtype: torch.dtype, kind: Kind = "down"
) -> Schedule:
    """The schedule for `rows` over `experts`, sums of length k."""
    if dtype != torch.bfloat16:
        return by_rule(rows / experts, dtype)
    return nearest(table(), kind, experts, k, rows / experts) or by_rule(rows / experts, dtype)


def nearest(
    entries: tuple[Entry, ...], kind: str, experts: int, k: int, mean: float
) -> Schedule | None:
    """The entry of the nearest shape, and of it the nearest number of rows."""

    def far(entry: Entry) -> tuple[float, float]:
        shape = abs(log2(entry.experts / experts)) + abs(log2(entry.k / k))
        return round(shape, 6), abs(log2(entry.mean / mean))

    best = min((e for e in entries if e.kind == kind), key=far, default=None)
    return best.schedule if best is not None and far(best)[0] <= NEAR else None


def by_rule(mean: float, dtype: torch.dtype) -> Schedule:
    """What fits the mean number of rows (benchmarks/results: kernels-matmul.json, and from 96 on
    tune-moe-h200.json)."""
    if dtype == torch.float32:
        if mean <= 16:
            return Schedule(Tile(16, 64, 32, 4, 2, True), 1)
        return Schedule(Tile(64, 64, 32, 4, 2))
    if mean <= 1.5:
        return Schedule(Tile(16, 64, 128, 4, 4, True), 1)
    if mean <= 6:
        return Schedule(Tile(32, 64, 128, 4, 3, True, True), 1)
    if mean <= 96:
        return Schedule(Tile(64, 128, 64, 4, 4, False, True))
    if mean <= 160:
        return Schedule(Tile(128, 256, 64, 8, 4, False, True), halved=True, spread=True)
    return Schedule(Tile(128, 256, 64, 8, 3, False, True), halved=mean < HALVED_BELOW)


def candidates(mean: float, kind: Kind) -> tuple[Schedule, ...]:
    """What is tried for so many rows of an expert, the rule's first."""
    few = (
        Schedule(Tile(16, 64, 128, 4, 4, True), 1),
        Schedule(Tile(16, 64, 128, 4, 4, True, True), 1),
        Schedule(Tile(16, 64, 256, 4, 3, True, True), 1),
        Schedule(Tile(16, 128, 128, 4, 4, True, True), 1),
        Schedule(Tile(16, 128, 64, 4, 5, True, True), 1),
        Schedule(Tile(32, 64, 128, 4, 3, True, True), 1),
        Schedule(Tile(32, 128, 128, 4, 3, True, True), 1),
    )
    some = (
        Schedule(Tile(32, 128, 64, 4, 4, True, True), 1),
        Schedule(Tile(64, 64, 128, 4, 3, True, True), 1),
        Schedule(Tile(64, 128, 64, 4, 4, False, True)),
        Schedule(Tile(64, 128, 128, 4, 3, False, True)),
        Schedule(Tile(64, 256, 64, 4, 3, False, True)),
        Schedule(Tile(64, 256, 64, 8, 4, False, True)),
    )
    high = (
        Schedule(Tile(128, 128, 64, 4, 3, False, True)),
        Schedule(Tile(128, 128, 64, 8, 3, False, True)),
        Schedule(Tile(128, 256, 64, 8, 3, False, True)),
        Schedule(Tile(128, 256, 64, 8, 4, False, True)),
    )
    halved = tuple(schedule._replace(halved=True) for schedule in high)
    spread = tuple(s._replace(spread=True) for s in (*high[2:], *halved[2:]))
    many = (
        *(*high, *halved),
        Schedule(Tile(128, 256, 64, 8, 3, False, True), 16),
        Schedule(Tile(128, 256, 64, 8, 4, False, True), 16),
        Schedule(Tile(128, 256, 64, 8, 4, False, True), 32),
        Schedule(Tile(256, 128, 64, 8, 3, False, True)),
        Schedule(Tile(256, 128, 64, 8, 4, False, True)),
        Schedule(Tile(128, 256, 64, 8, 3, False, True), 8, True),
        Schedule(Tile(128, 256, 64, 8, 4, False, True), 16, True),
    )
    if mean <= 3:
        tried = few
    elif mean <= 40:
        tried = (*few[1:4], *few[5:], *some)
    elif mean <= 160:
        tried = (*some[1:], *high, *halved, *spread)
    else:
        tried = many
    if kind == "gathered":
        tried = tuple(s for s in tried if s.tile.rows <= 64 and not s.persistent)
    first = by_rule(mean, torch.bfloat16)
    return (first, *(s for s in tried if s != first))
