"""Products in registers: the bits of plain sums for every tail, on every kind of machine, and no
number read or written beside those that are asked for."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.kernels import exact, loops, micro
from suzuri.kernels.arrays import Array
from suzuri.kernels.compiled import loop
from tests.kernels.compare import threads

ROOT = Path(__file__).parents[2]
KINDS = pytest.mark.parametrize("kind", [np.float32, np.float64])
EDGES = (np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -1e-45, 1e-40)
W, L = micro.WIDTH, micro.LANES


def drawn(shape: tuple[int, int], seed: int, kind: Any) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def hostile(shape: tuple[int, int], seed: int, kind: Any) -> Array:
    """Of any size between denormal and near the largest, some of them no numbers at all."""
    g = np.random.default_rng(seed)
    x = g.standard_normal(shape) * 10.0 ** g.integers(-44, 38, shape)
    places = g.integers(0, 40, shape)
    for i, value in enumerate(EDGES):
        x[places == i] = value
    return x.astype(kind)


def in_order(x: Array, w: Array) -> Array:
    return exact._in_order(torch.from_numpy(x), torch.from_numpy(w.T)).numpy()


def assert_same(found: Array, expected: Array, what: object) -> None:
    """The same bits; one NaN is as good as another."""
    same = found.view(np.int64) == expected.view(np.int64)
    assert (same | (np.isnan(found) & np.isnan(expected))).all(), what


@KINDS
@pytest.mark.parametrize("rows", [*range(1, 10), 23, 24, 25, 26, 27, 128, 131])
def test_every_tail_of_rows_columns_and_k(rows: int, kind: Any):
    widths = {1, 2, L - 1, L, L + 1, 2 * L, W - 1, W, W + 1, 2 * W - 1, 2 * W, 3 * W + L + 3}
    for columns in sorted(widths | {130, 512, 513, 1030}):
        for k in (1, 2, 31, 32, 33, 63, 64, 65, 130):
            if rows > 27 and (columns + k) % 5:
                continue
            for draw in (drawn, hostile):
                what = (rows, columns, k, draw)
                x, w = draw((rows, k), columns, kind), draw((k, columns), k, kind)
                found = np.empty((rows, columns))
                loops.products(x, w, found, 0, columns)
                assert_same(found, in_order(x, w), what)
                first = (7 * k) % columns
                last = columns - (columns - first) // 3
                part = np.full((rows, columns), 7.0)
                loops.products(x, w, part, first, last)
                assert (part[:, :first] == 7).all() and (part[:, last:] == 7).all(), what
                inside = np.ascontiguousarray(part[:, first:last])
                assert_same(inside, np.ascontiguousarray(found[:, first:last]), what)


@KINDS
def test_a_row_alone_is_a_row_among_others(kind: Any):
    for columns, k in ((5, 40), (L, 70), (W, 64), (2 * W + 3, 200), (1100, 130)):
        x, w = hostile((140, k), k, kind), hostile((k, columns), columns, kind)
        among = np.empty((140, columns))
        loops.products(x, w, among, 0, columns)
        for rows in (1, 2, 3, 4, 7, 24, 129):
            for start in (0, 11, 140 - rows):
                few = np.empty((rows, columns))
                loops.products(x[start : start + rows], w, few, 0, columns)
                assert_same(few, among[start : start + rows], (columns, k, rows, start))


def test_no_k_is_a_sum_of_nothing():
    y = np.full((3, 40), 7.0, np.float32)
    loops.products(np.empty((3, 0), np.float32), np.empty((0, 40), np.float32), y, 0, 40)
    assert not y.any()


def test_memory_around_a_product_is_neither_used_nor_changed():
    """x, w and y in the middle of NaN: the last vectors of each end where it ends."""
    for rows, columns, k in ((1, L + 1, 3), (3, W + 1, 65), (5, 3, 33), (25, 2 * W + 5, 64)):
        sizes = (rows * k, k * columns, rows * columns)
        rooms = [np.full(size + 256, np.nan, np.float32) for size in sizes]
        inner = [room[128 : 128 + size] for room, size in zip(rooms, sizes, strict=True)]
        x, w, y = (
            a.reshape(s)
            for a, s in zip(inner, ((rows, k), (k, columns), (rows, columns)), strict=True)
        )
        x[:], w[:] = drawn((rows, k), 1, np.float32), drawn((k, columns), 2, np.float32)
        loops.products(x, w, y, 0, columns)
        assert np.array_equal(y, in_order(x, w).astype(np.float32))
        for room in rooms:
            assert np.isnan(room[:128]).all() and np.isnan(room[-128:]).all()


@pytest.mark.parametrize("shape", [(3, 2, 2), (4, 2, 4), (2, 3, 8), (1, 5, 16)])
def test_tiles_for_other_machines(shape: tuple[int, int, int]):
    """Vectors that this machine may not have: their parts are handled one by one."""
    rows, vectors, lanes = shape
    tile: Callable[..., None] = micro.make_tile(rows, vectors, lanes)

    @loop
    def run(x64, w, totals, k, count, fresh, source):
        tile(x64, 1, w, k, 2, totals, 3, fresh, count, source)

    width = vectors * lanes
    for kind in (np.float32, np.float64):
        x, w = hostile((rows + 2, 9), 3, kind), hostile((20, width + 4), 4, kind)
        totals = np.full((rows + 2, width + 5), 7.0)
        x64 = x.astype(np.float64)
        run(x64, w, totals, 4, 5, True, x)
        run(x64[:, 5:].copy(), w, totals, 9, 4, False, x)
        inside = np.ascontiguousarray(totals[1:-1, 3:-2])
        wanted = in_order(x[1:-1], np.ascontiguousarray(w[4:13, 2:-2]))
        assert_same(inside, wanted, (shape, kind))
        totals[1:-1, 3:-2] = 7
        assert (totals == 7).all()


def test_what_a_machine_can_do_is_read_from_its_features():
    assert micro.vectors_of("x86_64-unknown-linux-gnu", "+avx,+avx2,+avx512f,-amx") == (8, 4)
    assert micro.vectors_of("x86_64-unknown-linux-gnu", "+avx,+avx2,-avx512f") == (4, 3)
    assert micro.vectors_of("x86_64-unknown-linux-gnu", "+sse2,-avx") == (2, 3)
    assert micro.vectors_of("arm64-apple-darwin23", "") == (2, 4)


DIGEST = """
import hashlib
import numpy as np
from suzuri.kernels import loops, micro
found = hashlib.sha256()
for rows, columns, k in ((1, 70, 40), (5, 37, 65), (30, 9, 33), (26, 130, 70), (3, 3, 5)):
    g = np.random.default_rng(rows)
    x = g.standard_normal((rows, k)).astype(np.float32)
    w = g.standard_normal((k, columns)).astype(np.float32)
    for kind in (np.float32, np.float64):
        y = np.empty((rows, columns))
        loops.products(x.astype(kind), w.astype(kind), y, 0, columns)
        found.update(y.tobytes())
print(micro.LANES, micro.VECTORS, found.hexdigest())
"""
MACHINES = {
    "plain": ("generic", "", "2 3"),
    "fma": ("haswell", "+avx,+avx2,+fma", "4 3"),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names machines of this kind")
def test_older_machines_have_the_same_bits(tmp_path: Path):
    """Without AVX-512, without AVX, without fused products; each keeps code of its own."""
    expected = hashlib.sha256()
    for rows, columns, k in ((1, 70, 40), (5, 37, 65), (30, 9, 33), (26, 130, 70), (3, 3, 5)):
        g = np.random.default_rng(rows)
        x = g.standard_normal((rows, k)).astype(np.float32)
        w = g.standard_normal((k, columns)).astype(np.float32)
        for _ in range(2):
            expected.update(in_order(x, w).tobytes())
    for name, (cpu, features, shape) in MACHINES.items():
        if any(f"{flag[1:]}" not in _flags() for flag in features.split(",") if flag):
            continue
        environment = os.environ | {
            "NUMBA_CPU_NAME": cpu,
            "NUMBA_CPU_FEATURES": features,
            "XDG_CACHE_HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        }
        words = [sys.executable, "-c", DIGEST]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*shape.split(), expected.hexdigest()], name


def _flags() -> set[str]:
    """What this machine can do, by the names of its operating system."""
    return set(Path("/proc/cpuinfo").read_text().split())


def test_many_threads_share_rows_or_columns():
    for rows, columns, k in ((700, 70, 100), (9, 5000, 100), (4, 70_000, 16)):
        x, w = drawn((rows, k), 1, np.float32), drawn((k, columns), 2, np.float32)
        whole = np.empty((rows, columns))
        loops.products(x, w, whole, 0, columns)
        for number in (1, 2, 3):
            with threads(number):
                found = np.full((rows, columns), 7.0)
                loops.multiply(x, w, found)
                assert_same(found, whole, (rows, columns, number))
