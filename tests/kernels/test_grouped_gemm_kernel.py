"""The grouped kernel: every row has the bits of a plain product with its expert's weight."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.grouped_gemm import cases, grouped_gemm
from suzuri.kernels.matmul import buckets
from tests.kernels.compare import Arguments, assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
import triton
import triton.language as tl

from suzuri.kernels.grouped_gemm import kernel
from suzuri.kernels.grouped_gemm.tiles import Schedule
from suzuri.kernels.matmul import kernel as matmul
from suzuri.kernels.matmul.kernel import Tile

NOISE = 2.0**-18
TILES = (
    Tile(16, 16, 128, 2, 3, True),
    Tile(16, 64, 128, 4, 4, True),
    Tile(32, 64, 64, 4, 3, True),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(16, 64, 128, 4, 4, True, True),
    Tile(64, 128, 64, 4, 4, False, True),
    Tile(128, 128, 64, 4, 3, False, True),
    Tile(128, 256, 64, 8, 4, False, True),
    Schedule(Tile(128, 256, 64, 8, 4, False, True), halved=True),
    Schedule(Tile(128, 128, 64, 4, 3, False, True), halved=True, spread=True),
)
COUNTS = (3, 0, 70, 1, 16, 17, 0, 0, 129, 64, 0, 192, 193)


def run(arguments: Arguments, **options: Any) -> torch.Tensor:
    given: Arguments = {"out_dtype": torch.float32, **options}
    with nan_filled():
        return kernel.grouped_gemm(**arguments, **given)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_fp64_product(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y_MF = run(arguments)
    assert_same_bits(run(arguments, out_dtype=dtype), y_MF.to(dtype))
    x, w = arguments["x_MK"].double(), arguments["weight_EFK"].double()
    offsets = arguments["offsets_E1"].tolist()
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        rows, weight = x[begin:end], w[expert]
        size = rows.abs() @ weight.abs().T
        assert_close(y_MF[begin:end], rows @ weight.T, ulps=1, noise=NOISE, magnitude=size)


@in_interpreter
def test_one_expert_is_a_plain_product():
    arguments: Arguments = cases.build("odd", torch.float32, generator(2))
    x, w = arguments["x_MK"], arguments["weight_EFK"][:1]
    offsets = torch.tensor([0, len(x)])
    assert_same_bits(
        kernel.grouped_gemm(x, w, offsets, torch.float32),
        matmul.ours(x, w[0], 1.0, torch.float32),
    )
    assert kernel.grouped_gemm(x[:0], w, offsets * 0, torch.bfloat16).shape == (0, w.shape[1])


@in_interpreter
def test_tiles_that_straddle_experts_and_are_empty():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(3))
    expected = kernel.grouped_gemm(**arguments, out_dtype=torch.float32)
    tiles = (Tile(2, 32, 16, 2, 2), Tile(8, 16, 64, 2, 2, True), Tile(64, 64, 32, 4, 2))
    for tile in (*tiles, Tile(4, 32, 16, 4, 2, False, True), Tile(16, 32, 64, 4, 2, True, True)):
        actual = run(arguments, tile=tile)
        magnitude = torch.full_like(expected, 8.0).double()
        assert_close(actual, expected.double(), ulps=1, noise=2.0**-22, magnitude=magnitude)


@in_interpreter
def test_last_tiles_of_half_the_rows(monkeypatch: pytest.MonkeyPatch):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(3))
    schedule = Schedule(Tile(8, 32, 16, 4, 2, False, True))
    whole = run(arguments, tile=schedule)
    high: list[int] = []
    begin = kernel.described

    def seen(x: torch.Tensor, rows: int, columns: int) -> Any:
        high.append(rows)
        return begin(x, rows, columns)

    monkeypatch.setattr(kernel, "described", seen)
    left = arguments["offsets_E1"].diff() % 8
    assert ((left > 0) & (left <= 4)).any() and (left > 4).any()
    assert_same_bits(run(arguments, tile=schedule._replace(halved=True)), whole)
    assert 4 in high


@in_interpreter
@pytest.mark.parametrize("case", ["tiny", "odd"])
def test_tiles_of_shared_experts_lie_among_the_others(case: str):
    arguments: Arguments = cases.build(case, torch.float32, generator(3))
    experts, offsets = len(arguments["weight_EFK"]), arguments["offsets_E1"]
    for left in (0, 3):  # rows that are no expert's
        given = arguments | {"offsets_E1": offsets.clamp(max=int(offsets[-1]) - left)}
        for tile in (Tile(2, 32, 16, 2, 2), Tile(4, 16, 64, 2, 2, True)):
            whole = run(given, tile=Schedule(tile))
            for shared in range(experts + 1):
                spread = run(given, tile=Schedule(tile, spread=True), num_shared=shared)
                assert_same_bits(spread, whole, f"{shared} shared, {left} rows left, {tile}")


@in_interpreter
def test_every_tile_is_taken_once():
    """Programs of 3 experts and 2 shared ones, in an order that differs from theirs."""
    offsets = torch.tensor([0, 5, 5, 12, 29, 46])
    found = torch.full((40,), -1, dtype=torch.int32)
    launch: Any = order_of
    launch[(40,)](offsets, found, 2, E=5, E_PADDED=8, BM=4, LAST=2)
    taken = found.tolist()  # of 2 x (2 + 0 + 2 + 5 + 5) tiles
    assert sorted(taken) == list(range(40))
    assert taken[28:] == list(range(28, 40))
    shared = [place for place, program in enumerate(taken[:28]) if program >= 8]
    assert len(shared) == 20
    assert all(any(p < 8 for p in taken[i : i + 4]) for i in range(0, 24, 4)), "evenly"


@triton.jit
def order_of(
    offsets,
    found,
    num_n,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    BM: tl.constexpr,
    LAST: tl.constexpr,
):
    program = tl.program_id(0)
    tl.store(found + program, kernel._spread(offsets, program, num_n, E, E_PADDED, BM, LAST))


def hostile(counts: tuple[int, ...], f: int, k: int, dtype: torch.dtype, seed: int) -> Arguments:
    g = generator(seed, "cuda")
    weight = buckets.hostile_weight(len(counts) * f, k, g).to(dtype)
    return {
        "x_MK": buckets.hostile_rows(sum(counts), k, g).to(dtype),
        "weight_EFK": weight.unflatten(0, (len(counts), f)),
        "offsets_E1": torch.tensor([0, *accumulate(counts)], device="cuda"),
    }


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("f", "k"), [(211, 129), (768, 1024)])
def test_rows_have_the_bits_of_matmul_in_every_tile(f: int, k: int, dtype: torch.dtype):
    tiles = TILES if dtype == torch.bfloat16 else (Tile(16, 64, 32, 4, 2, True), None)
    for seed in range(2):
        arguments = hostile(COUNTS, f, k, dtype, seed)
        offsets = arguments["offsets_E1"].tolist()
        for tile in tiles:
            y_MF = run(arguments, tile=tile, num_shared=2)
            for expert, (begin, end) in enumerate(pairwise(offsets)):
                rows = arguments["x_MK"][begin:end]
                alone = matmul.ours(rows, arguments["weight_EFK"][expert], 1.0, torch.float32)
                assert_same_bits(y_MF[begin:end], alone, f"expert {expert}, {tile}")


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others():
    for m in range(1, 71):
        alone = hostile((70, 5), 258, 512, torch.bfloat16, 7)
        whole = run(alone)
        part = {
            "x_MK": torch.cat([alone["x_MK"][:m], alone["x_MK"][70:72]]),
            "weight_EFK": alone["weight_EFK"],
            "offsets_E1": torch.tensor([0, m, m + 2], device="cuda"),
        }
        assert_same_bits(run(part), torch.cat([whole[:m], whole[70:72]]), f"{m} rows")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_op_runs_the_kernel(dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(4, "cuda"))
    with dispatch.force("reference"):
        expected = grouped_gemm(**arguments, out_dtype=dtype)
    actual = grouped_gemm(**arguments, out_dtype=dtype)
    size = torch.full_like(expected, 8.0).double()
    assert_close(actual, expected.double(), ulps=1, noise=NOISE, magnitude=size)
