"""The table of tiles: how it is read, and what is taken for sizes that were not measured."""

import json
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from suzuri.kernels.grouped_gemm import tiles
from suzuri.kernels.grouped_gemm.tiles import Entry, Schedule, by_rule, candidates, nearest
from suzuri.kernels.matmul.kernel import Tile

A, B, C = (Schedule(Tile(16, n, 64, 4, 3, True, True), 1) for n in (16, 32, 64))
ENTRIES = (
    Entry("down", 66, 3072, 1.0, A),
    Entry("down", 66, 3072, 100.0, B),
    Entry("down", 258, 3072, 1.0, C),
    Entry("gate_up", 66, 6144, 1.0, C),
)
KINDS: tuple[tiles.Kind, ...] = ("gate_up", "gathered", "down")


@pytest.mark.parametrize(
    ("kind", "experts", "k", "mean", "expected"),
    [
        ("down", 66, 3072, 0.01, A),
        ("down", 66, 3072, 9.0, A),
        ("down", 66, 3072, 11.0, B),
        ("down", 64, 2048, 1e6, B),
        ("down", 256, 3072, 1e6, C),
        ("down", 8, 3072, 1.0, None),
        ("gate_up", 66, 3072, 50.0, C),
        ("gathered", 66, 3072, 1.0, None),
    ],
)
def test_the_nearest_shape_and_of_it_the_nearest_size(
    kind: str, experts: int, k: int, mean: float, expected: Schedule | None
):
    assert nearest(ENTRIES, kind, experts, k, mean) == expected


def test_a_table_comes_back_as_it_was_written():
    rows = [{**e._asdict(), "schedule": e.schedule.as_json(), "us": 1.0} for e in ENTRIES]
    assert tiles.read(json.dumps({"entries": rows})) == ENTRIES


def test_what_is_shipped_is_sound_and_covers_every_size():
    for entry in tiles.table():
        assert entry.kind in KINDS
        assert entry.schedule in candidates(entry.mean, entry.kind)
    for kind, rows, experts in product(KINDS, (1, 8, 512, 70_000), (2, 66, 258)):
        for dtype in (torch.bfloat16, torch.float32):
            schedule = tiles.schedule_for(rows, experts, 6144, dtype, kind)
            assert isinstance(schedule, Schedule)
            assert not (schedule.persistent and schedule.tile.swapped)


def test_the_rule_is_the_first_candidate():
    for kind, mean in product(KINDS, (0.1, 2.0, 20.0, 100.0, 1000.0)):
        tried = candidates(mean, kind)
        assert tried[0] == by_rule(mean, torch.bfloat16)
        assert len(set(tried)) == len(tried)
        for tile in (schedule.tile for schedule in tried):
            step = 2 * (tile.rows + tile.columns) * tile.depth
            assert tile.stages * step <= 220 << 10, tile
