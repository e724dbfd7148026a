"""The Triton kernels of paged_attention: interpreted (fp32, close) and on a GPU (bits)."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from suzuri.kernels import dispatch
from suzuri.kernels.paged_attention import cases, kernel, paged_attention
from suzuri.kernels.relative_attention import kernel as rows_kernel
from tests.kernels.compare import FP32_EPS, Arguments, assert_close, assert_same_bits, generator
from tests.kernels.paging import GARBAGE_PAGES, Rows, random_proj, random_rows
from tests.kernels.plain_attention import attend_rows
from tests.kernels.triton_interpreter import patch_loop_bounds

NOISE = {
    # As in test_relative_attention_kernel.py.
    torch.float32: 400 * FP32_EPS,
    torch.bfloat16: 1.02 * 2.0**-8,
}
SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]
on_gpu = pytest.mark.gpu
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
LAYERS = {"global": (64, 8, 1024, None), "local": (64, 16, 512, 512)}
"""Inkling's: heads, KV heads, reach, window."""
each_layer = pytest.mark.parametrize("layer", LAYERS)
Step = Sequence[tuple[int, int]]
"""Per sequence of a batch: position of its first new row, number of new rows."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops can be interpreted, and every buffer that a kernel allocates starts as NaN."""
    patch_loop_bounds(monkeypatch)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


class Paged:
    """Whole sequences and their keys in shuffled pages of one pool."""

    def __init__(
        self, sequences: Sequence[Rows], proj: Tensor, window: int | None, size: int = 128
    ) -> None:
        self.sequences, self.proj, self.window, self.size = sequences, proj, window, size
        counts = [-(-len(rows.q) // size) for rows in sequences]
        order = torch.randperm(sum(counts) + 3, generator=generator(5)).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.num_pages = sum(counts) + 3

    def arguments(self, step: Step, columns: int = 0, extra: int = 0) -> Arguments:
        """One batch. Where no row may look, pages hold the largest finite values and the table
        pages that do not exist; `extra` rows of no sequence are NaN."""
        k = self.sequences[0].k
        device, size, most = k.device, self.size, torch.finfo(k.dtype).max
        shape = (self.num_pages, size, *k.shape[1:])
        k_pages = torch.full(shape, most, dtype=k.dtype, device=device)
        v_pages = -k_pages
        columns = max(columns, *map(len, self.pages))
        table = torch.tensor([[GARBAGE_PAGES[m % 4] for m in range(columns)]] * len(step))
        for s, (rows, (first, num)) in enumerate(zip(self.sequences, step, strict=True)):
            seen = 0 if self.window is None else max(first - self.window + 1, 0)
            for m in range(seen // size, -(-(first + num) // size) if num else 0):
                page, start = self.pages[s][m], m * size
                table[s, m] = page
                a, b = max(seen, start), min(first + num, start + size)
                k_pages[page, a - start : b - start] = rows.k[a:b]
                v_pages[page, a - start : b - start] = rows.v[a:b]
        new = [
            (rows.q[first : first + num], rows.r[first : first + num])
            for rows, (first, num) in zip(self.sequences, step, strict=True)
        ]
        nan = [x.new_full((extra, *x.shape[1:]), torch.nan) for x in new[0]]
        q, r = (torch.cat(parts) for parts in zip(*new, nan, strict=True))
        return {
            "q_NHC": q,
            "r_NHB": r,
            "proj_BE": self.proj,
            "k_pages_PTUC": k_pages,
            "v_pages_PTUC": v_pages,
            "page_table_SM": table.to(device),
            "first_positions_S": torch.tensor([first for first, _ in step], device=device),
            "seq_starts_S1": torch.tensor([0, *(n for _, n in step)], device=device).cumsum(0),
            "window": self.window,
        }

    def whole(self) -> list[Tensor]:
        """Every row of every sequence, by relative_attention."""
        return [
            rows_kernel.relative_attention(
                *rows, self.proj, torch.tensor([0, len(rows.q)], device=rows.q.device), self.window
            )
            for rows in self.sequences
        ]

    def check(self, step: Step, **changes: Any) -> None:
        """The batch has the bits of the whole sequences."""
        out = run(self.arguments(step), **changes).split([num for _, num in step])
        for s, ((first, num), part) in enumerate(zip(step, out, strict=True)):
            expected = self.expected[s][first : first + num]
            assert_same_bits(part, expected, f"{first} + {num}, {changes}")

    @property
    def expected(self) -> list[Tensor]:
        if not hasattr(self, "_expected"):
            self._expected = self.whole()
        return self._expected


def plan_for(arguments: Arguments, **changes: Any) -> kernel.Plan:
    """Fields of Plan or of its Launch replaced by `changes`."""
    k, v, q = (arguments[name] for name in ("k_pages_PTUC", "v_pages_PTUC", "q_NHC"))
    shape = rows_kernel.shape_of(q, k.shape[2], arguments["proj_BE"], arguments["window"])
    num_seqs, columns = arguments["page_table_SM"].shape
    tma = changes.pop("tma", True) and kernel.can_tma_pages(k, v)
    plan = kernel.plan_of(shape, len(q), num_seqs, columns * k.shape[1], tma=tma)
    return dataclasses.replace(plan, **changes)


def run(arguments: Arguments, **changes: Any) -> Tensor:
    return kernel.paged_attention(**arguments, plan=plan_for(arguments, **changes))


def plain(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Keys gathered from their pages, then attention row by row in fp64."""
    size = arguments["k_pages_PTUC"].shape[1]
    starts = arguments["seq_starts_S1"].tolist()
    parts: list[tuple[Tensor, Tensor]] = []
    for s, first in enumerate(arguments["first_positions_S"].tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        pages = arguments["page_table_SM"][s, : -(-(first + end - begin) // size)]
        pages = pages.clamp(0, len(arguments["k_pages_PTUC"]) - 1)
        k, v = (
            arguments[name][pages].flatten(0, 1)[: first + end - begin].double()
            for name in ("k_pages_PTUC", "v_pages_PTUC")
        )
        q, r = (arguments[name][begin:end].double() for name in ("q_NHC", "r_NHB"))
        parts.append(attend_rows(q, k, v, r, arguments["proj_BE"].double(), arguments["window"]))
    out, size_of = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(size_of)


def inkling_rows(length: int, layer: str, seed: int = 0) -> Rows:
    heads, kv_heads, _, _ = LAYERS[layer]
    return random_rows(
        length, heads=heads, kv_heads=kv_heads, channels=128, width=16, seed=seed, device="cuda"
    )


def inkling(lengths: Sequence[int], layer: str, size: int = 128) -> Paged:
    _, _, reach, window = LAYERS[layer]
    sequences = [inkling_rows(n, layer, seed=i) for i, n in enumerate(lengths)]
    return Paged(sequences, random_proj(reach, sequences[0]), window, size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
@pytest.mark.parametrize("case", SMALL)
def test_interpreted(case: str):
    arguments: Arguments = cases.build(case, torch.float32, generator(1))
    expected, size = plain(arguments)
    out = run(arguments)
    assert_close(out, expected, magnitude=size, noise=NOISE[torch.float32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
@pytest.mark.parametrize("window", [None, 70])
def test_interpreted_plans(window: int | None):
    """Long and short sequences in one batch, several passes, rows of no sequence."""
    sequences = [
        random_rows(n, heads=3, kv_heads=1, seed=i, dtype=torch.float32)
        for i, n in enumerate([620, 40, 3, 610])
    ]
    paged = Paged(sequences, random_proj(40, sequences[0]), window, size=16)
    arguments = paged.arguments([(619, 1), (20, 20), (0, 0), (604, 6)], extra=3)
    expected, size = plain(arguments)
    for changes in (
        {},
        {"longest": 8, "chunks": 1, "passes": 4, "programs": 3, "tokens": 4},
        {"longest": 0},
    ):
        out = run(arguments, **changes)
        assert_close(out[:-3], expected, magnitude=size, noise=NOISE[torch.float32])
        assert_same_bits(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
@pytest.mark.parametrize("stages", [2, 3])
def test_interpreted_descriptors(stages: int):
    """Keys by the bulk copy engine, in the rows and the split kernel; a window over two pages."""
    sequences = [
        random_rows(n, heads=4, kv_heads=2, channels=16, seed=i, dtype=torch.float32)
        for i, n in enumerate([200, 64])
    ]
    paged = Paged(sequences, random_proj(40, sequences[0]), 70)
    arguments = paged.arguments([(180, 20), (60, 4)])
    launch = dataclasses.replace(plan_for(arguments).rows, tma=True)
    expected, size = plain(arguments)
    out = run(arguments, rows=launch, longest=8, stages=stages)
    assert_close(out, expected, magnitude=size, noise=NOISE[torch.float32])


def test_a_plan_uses_the_whole_gpu_and_bounds_its_workspace():
    shape = rows_kernel.Shape(64, 8, 128, 16, 1024, None, torch.bfloat16)
    long = kernel.plan_of(shape, 1, 1, 1 << 20, tma=True)
    assert long.programs * 8 >= kernel.PROGRAMS
    for rows, seqs, capacity in ((1, 1, 1 << 20), (2040, 41, 1 << 17), (64, 64, 1 << 20)):
        plan = kernel.plan_of(shape, rows, seqs, capacity, tma=True)
        places = kernel.places_of(plan.longest, rows, seqs)[1]
        assert 4 * places * 64 * plan.chunks * (128 + 9) <= kernel.WORKSPACE
        assert plan.chunks * plan.passes * 512 >= capacity


@on_gpu
@each_dtype
@pytest.mark.parametrize("case", list(cases.SHAPES))
def test_against_attention_row_by_row(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, "cuda"))
    expected, size = plain(arguments)
    assert_close(run(arguments), expected, magnitude=size, noise=NOISE[dtype])


@on_gpu
@each_dtype
@pytest.mark.parametrize("case", SMALL)
def test_against_the_reference(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(2, "cuda"))
    with dispatch.force("reference"):
        expected = paged_attention(**arguments).double()
    _, size = plain(arguments)
    error = ((paged_attention(**arguments).double() - expected).abs() / size).flatten()
    assert error.max() < (2.0**-7 if dtype == torch.bfloat16 else 400 * FP32_EPS)


@on_gpu
@each_layer
def test_decode_has_the_bits_of_prefill(layer: str):
    """One row after 24 contexts, in a batch and alone."""
    ends = [1, 2, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513, 700, 1023, 1024, 1025, 1500, 2047]
    ends += [2049, 3000, 4095, 4097, 4160, 4200]
    paged = inkling([4200], layer)
    batch = Paged([*paged.sequences] * len(ends), paged.proj, paged.window)
    batch._expected = paged.expected * len(ends)
    batch.check([(end - 1, 1) for end in ends])
    for end in ends:
        paged.check([(end - 1, 1)])


@on_gpu
@each_layer
def test_verify_has_the_bits_of_prefill(layer: str):
    """Nine rows, in a batch and alone, with ragged companions."""
    ends = [9, 64, 65, 73, 512, 516, 520, 1025, 1030, 2050, 3000]
    paged = inkling([3000], layer)
    batch = Paged([*paged.sequences] * len(ends), paged.proj, paged.window)
    batch._expected = paged.expected * len(ends)
    batch.check([(end - 9, 9) for end in ends])
    batch.check([(end - 1 - s % 9, 1 + s % 9) for s, end in enumerate(ends)])
    for end in ends:
        paged.check([(end - 9, 9)])


@on_gpu
@each_layer
@pytest.mark.parametrize("size", [128, 64, 16])
def test_chunked_prefill_has_the_bits_of_prefill(layer: str, size: int):
    paged = inkling([3000], layer, size)
    ends = [0, 1000, 1017, 1300, 1301, 1320, 2900, 3000]
    for first, end in pairwise(ends):
        paged.check([(first, end - first)])


@on_gpu
@each_layer
def test_no_plan_changes_a_bit(layer: str):
    """A long chunk, decodes, a verify, idle sequences: the grid and the passes vary."""
    paged = inkling([2300, 1500, 700, 40, 1200, 5], layer)
    step = [(1200, 1100), (1499, 1), (691, 9), (39, 1), (0, 0), (0, 5)]
    paged.check(step)
    for changes in (
        {"longest": 0},
        {"longest": 1200, "chunks": 3, "passes": 4},
        {"longest": 8, "programs": 1},
        {"longest": 16, "programs": 7, "chunks": 1, "passes": 5},
        {"tokens": 1},
        {"tokens": 2, "programs": 1000},
        {"tokens": 8, "stages": 2, "columns": 64},
        {"tokens": 16, "warps": 8, "columns": 16},
        {"tma": False, "stages": 3},
        {"warps": 1, "tokens": 1},
    ):
        paged.check(step, **changes)


@on_gpu
@each_layer
def test_wide_tables_and_rows_of_no_sequence(layer: str):
    """A table for a million tokens, fixed shapes with room for more rows than there are."""
    paged = inkling([1500, 70], layer)
    step = [(1495, 5), (69, 1)]
    expected = run(paged.arguments(step))
    for columns, extra in ((8192, 0), (0, 30), (8192, 2000)):
        out = run(paged.arguments(step, columns, extra))
        assert_same_bits(out[:6], expected, f"{columns} columns, {extra} more rows")
        assert_same_bits(out[6:], torch.zeros_like(out[6:]))


@on_gpu
@each_dtype
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [(4, 2, 16, 4), (5, 1, 20, 5), (3, 3, 12, 3), (8, 2, 32, 16)])
def test_other_heads_and_page_sizes(
    heads: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
):
    count, kv_heads, channels, width = heads
    rows = random_rows(
        *(600,), heads=count, kv_heads=kv_heads, channels=channels, width=width, dtype=dtype,
        device="cuda",
    )  # fmt: skip
    for size in (7, 16, 128):
        paged = Paged([rows, rows], random_proj(30, rows), window, size)
        for step in ([(0, 500), (599, 1)], [(599, 1), (100, 1)], [(591, 9), (11, 30)]):
            paged.check(step)


@on_gpu
def test_a_captured_graph_follows_what_its_inputs_hold():
    """Launch shapes come from tensor shapes alone, and nothing waits for the device."""
    paged = inkling([1500, 900], "global")
    one = paged.arguments([(1499, 1), (800, 1)])
    two = paged.arguments([(700, 1), (850, 1)])
    expected = [run(one), run(two)]
    held: Arguments = {n: x.clone() if isinstance(x, Tensor) else x for n, x in one.items()}
    run(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.paged_attention(**held)
    for given, wanted in zip((one, two), expected, strict=True):
        for name, x in given.items():
            if isinstance(x, Tensor):
                held[name].copy_(x)
        graph.replay()
        assert_same_bits(out, wanted)


@on_gpu
def test_repeated_runs_are_equal():
    paged = inkling([5000, 3000], "global")
    arguments = paged.arguments([(4991, 9), (2999, 1)])
    first = run(arguments)
    for _ in range(20):
        assert_same_bits(run(arguments), first)
