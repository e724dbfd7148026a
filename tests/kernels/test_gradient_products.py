"""Products for gradients: near fp64 for every tail, in equal bits on any number of threads, and no
number written beside those that are asked for."""

import numpy as np
import pytest
import torch

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array
from tests.kernels.compare import assert_same_bits, generator, threads

if not exact.has_loops():
    pytest.skip("numba is not there", allow_module_level=True)

from suzuri.kernels.gradient_products import DEPTH, HALF, PANEL, columns_times, rows_times
from suzuri.kernels.grouped_gemm import cpu, grouped_gemm

UNTOUCHED = 7.0
WIDTHS = (1, 3, HALF - 1, HALF, HALF + 1, PANEL, PANEL + 1, PANEL + HALF, 2 * PANEL + HALF + 1)


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def assert_near(found: Array, expected: Array, what: object) -> None:
    apart = np.linalg.norm(found - expected)
    assert apart <= 1e-6 * np.linalg.norm(expected), what


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 127, 128, 129, 131])
def test_rows_times(rows: int) -> None:
    for columns in WIDTHS:
        for depth in (1, 2, DEPTH - 1, DEPTH, DEPTH + 1, 2 * DEPTH + 3):
            x, w = drawn(rows + 2, depth + 5)[1:-1, 2:-3], drawn(depth, columns)
            around = np.full((rows + 2, columns), UNTOUCHED, np.float32)
            rows_times(x, w, around[1:-1])
            what = (rows, columns, depth)
            assert_near(around[1:-1], x.astype(np.float64) @ w, what)
            assert (around[[0, -1]] == UNTOUCHED).all(), what


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 127, 128, 129, 131])
def test_columns_times(rows: int) -> None:
    for columns in WIDTHS:
        for depth in (1, 2, DEPTH - 1, DEPTH, DEPTH + 1, 2 * DEPTH + 3):
            x, w = drawn(depth, rows + 3), drawn(depth, columns)
            found = np.full((rows + 3, columns), UNTOUCHED, np.float32)
            columns_times(x, w, found, 2, rows + 2)
            what = (rows, columns, depth)
            assert_near(found[2:-1], x[:, 2:-1].T.astype(np.float64) @ w, what)
            assert (found[[0, 1, -1]] == UNTOUCHED).all(), what


def test_what_is_no_number_stays_in_its_row_and_column() -> None:
    x, w = drawn(9, 40), drawn(40, PANEL + 3)
    x[4, 7], w[11, PANEL] = np.nan, np.inf
    found = np.empty((9, PANEL + 3), np.float32)
    rows_times(x, w, found)
    assert np.isfinite(np.delete(np.delete(found, 4, 0), PANEL, 1)).all()
    assert np.isnan(found[4]).all()
    assert not np.isfinite(found[:, PANEL]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_any_size_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """Where a thread's share of the rows ends within an expert, no bit moves."""
    g, sizes = generator(1), [0, 1, 700, 0, 37, 131, 0]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows, experts = int(offsets[-1]), len(sizes)
    x, grad = (torch.randn(rows, n, generator=g).to(dtype) for n in (96, 70))
    w = torch.randn(experts, 70, 96, generator=g).to(dtype)
    found: list[list[torch.Tensor]] = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(
                [
                    grouped_gemm(x, w, offsets, out_dtype=torch.float32),
                    cpu.of_inputs(grad, w, offsets),
                    cpu.of_weights(grad, x, offsets),
                ]
            )
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_same_bits(a, b, "threads")
    for e, n in enumerate(sizes):
        here = slice(int(offsets[e]), int(offsets[e]) + n)
        mine, given = x[here].double(), grad[here].double()
        assert_near(found[0][1][here].numpy(), (given @ w[e].double()).numpy(), e)
        assert_near(found[0][2][e].numpy(), (given.T @ mine).numpy(), e)
