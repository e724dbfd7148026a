"""The matrix kernel: close to fp64, the same bits whatever the tile, the rows or the library."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.matmul import buckets, cases, matmul
from tests.kernels.compare import Arguments, assert_close, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.matmul import kernel
from suzuri.kernels.matmul.kernel import Tile

TILES = (
    Tile(16, 16, 256, 2, 4, True),
    Tile(16, 32, 128, 4, 3, True),
    Tile(16, 64, 64, 4, 4, True),
    Tile(32, 64, 128, 4, 3, True),
    Tile(64, 128, 64, 8, 2, True),
    Tile(16, 64, 64, 1, 2),
    Tile(64, 64, 32, 4, 2),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(16, 64, 128, 4, 3, True, True),
    Tile(64, 64, 256, 4, 3, True, True),
    Tile(64, 16, 256, 4, 4, False, True),
    Tile(128, 128, 64, 4, 4, False, True),
    Tile(128, 256, 64, 8, 4, False, True),
)
FP32_TILES = (
    Tile(16, 64, 32, 4, 2, True),
    Tile(16, 16, 64, 2, 1),
    Tile(64, 64, 32, 4, 2),
    Tile(32, 128, 16, 8, 3, True),
)
NOISE = 2.0**-18
"""Of the size of the terms. The tensor cores cut off low bits where they add."""


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    return FP32_TILES if dtype == torch.float32 else TILES


def hostile(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and weights of the self-test, on the GPU."""
    g = generator(seed, "cuda")
    weight_NK = buckets.hostile_weight(n, k, g).to(dtype)
    return buckets.hostile_rows(m, k, g).to(dtype), weight_NK


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_close_to_the_fp64_product(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    x, w = (value.double() for value in arguments.values())
    with nan_filled():
        plain = kernel.ours(**arguments_of(arguments), scale=1.0, out_dtype=dtype)
        scaled = kernel.ours(**arguments_of(arguments), scale=1 / 24, out_dtype=torch.float32)
    magnitude = x.abs() @ w.abs().T
    assert_close(plain, x @ w.T, ulps=1, noise=NOISE, magnitude=magnitude)
    assert_close(scaled, x @ w.T / 24, ulps=2.5, noise=NOISE / 24, magnitude=magnitude)


def arguments_of(arguments: Arguments) -> Arguments:
    return {"x_NK": arguments["x_NK"], "weight_MK": arguments["weight_MK"]}


@in_interpreter
@pytest.mark.parametrize("tile", [Tile(16, 16, 32, 2, 2, True), Tile(32, 64, 16, 4, 2)])
def test_tiles_with_edges_on_every_side(tile: Tile):
    arguments: Arguments = cases.build("odd", torch.float32, generator(2))
    x, w = (value.double() for value in arguments.values())
    with nan_filled():
        y = kernel.ours(**arguments, scale=1.0, out_dtype=torch.float32, tile=tile)
    assert_close(y, x @ w.T, ulps=1, noise=NOISE, magnitude=x.abs() @ w.abs().T)


@in_interpreter
def test_descriptors_load_what_pointers_load():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(6))
    x, w = arguments["x_NK"], arguments["weight_MK"]
    for swapped in (False, True):
        tile = Tile(16, 64, 32, 4, 2, swapped, True)
        expected = kernel.ours(x, w, 1.0, torch.float32, tile._replace(descriptors=False))
        with nan_filled():
            assert_same_bits(kernel.ours(x, w, 1.0, torch.float32, tile), expected)
    assert not kernel.may_describe(x[:, 1:]) and not kernel.may_describe(w.T)


@in_interpreter
def test_strides_and_empty_operands():
    arguments: Arguments = cases.build("odd", torch.float32, generator(3))
    x, w = arguments["x_NK"], arguments["weight_MK"]
    expected = kernel.matmul(x, w, 1.0, torch.float32)
    wide = torch.zeros(x.shape[0], 2 * x.shape[1])
    wide[:, ::2] = x
    assert_same_bits(kernel.matmul(wide[:, ::2], w.T.contiguous().T, 1.0, torch.float32), expected)
    padded = torch.cat([x, x], 1)[:, : x.shape[1]]
    assert_same_bits(kernel.matmul(padded, w, 1.0, torch.float32), expected)
    assert kernel.matmul(x[:0], w, 1.0, torch.bfloat16).shape == (0, len(w))
    assert not kernel.matmul(x[:, :0], w[:, :0], 1.0, torch.float32).any()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(70, 211, 129), (70, 258, 6144), (300, 1024, 4096)], ids=str)
def test_every_tile_has_the_same_bits(shape: tuple[int, int, int], dtype: torch.dtype):
    m, n, k = shape
    for seed in range(3):
        x, w = hostile(m, n, k, dtype, seed)
        expected = kernel.ours(x, w, 1.0, torch.float32)
        for tile in tiles(dtype):
            with nan_filled():
                again = kernel.ours(x, w, 1.0, torch.float32, tile)
                rounded = kernel.ours(x, w, 1.0, torch.bfloat16, tile)
            assert_same_bits(again, expected, str(tile))
            assert_same_bits(rounded, expected.bfloat16(), f"rounded, {tile}")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(211, 129), (258, 6144), (6144, 1024)])
def test_rows_alone_have_the_bits_they_have_among_others(n: int, k: int, dtype: torch.dtype):
    x, w = hostile(1100, n, k, dtype, 5)
    whole = matmul(x, w, out_dtype=torch.float32)
    for m in range(1, 71):
        for rows in (slice(0, m), slice(1100 - m, 1100)):
            part = matmul(x[rows], w, out_dtype=torch.float32)
            assert_same_bits(part, whole[rows], f"{rows}")


@on_gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_library_is_asked_only_where_its_bits_are_ours(
    out_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    buckets._found.clear()
    n, k, device = 6144, 4096, torch.device("cuda", torch.cuda.current_device())
    buckets.prepare([(n, k, torch.bfloat16, out_dtype)], device)
    (file,) = (tmp_path / "suzuri" / "matmul").iterdir()
    (stored,) = json.loads(file.read_text())["equal"].values()
    assert stored, "the library agrees nowhere: is the self-test broken?"
    for m in (63, 64, 96, 1023, 1024, 2048, 3079, 8192 + 256, 9300):
        x, w = hostile(m, n, k, torch.bfloat16, 11)
        with nan_filled():
            actual = matmul(x, w, out_dtype=out_dtype)
        assert_same_bits(actual, kernel.ours(x, w, 1.0, out_dtype), f"{m} rows")
    buckets._found.clear()
    monkeypatch.setattr(buckets, "check", lambda *_: pytest.fail("tested again"))
    assert buckets.equal_buckets(n, k, torch.bfloat16, out_dtype, device) == tuple(stored)


@on_gpu
def test_a_captured_graph_has_the_same_bits():
    n, k = 6144, 4096
    for m in (7, 64, 256, 1500):
        x, w = hostile(m, n, k, torch.bfloat16, 13)
        expected = matmul(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = matmul(x, w)
        captured.fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, expected, f"{m} rows")


@on_gpu
def test_the_self_test_sees_another_order(monkeypatch: pytest.MonkeyPatch):
    """A split of K in two is refused at every bucket."""

    def split(x: Tensor, w: Tensor, out: Tensor) -> None:
        half = x.shape[1] // 2
        first = kernel.ours(x[:, :half], w[:, :half], 1.0, torch.float32)
        out.copy_(first + kernel.ours(x[:, half:], w[:, half:], 1.0, torch.float32))

    monkeypatch.setattr(buckets, "vendor", split)
    device = torch.device("cuda", torch.cuda.current_device())
    for out_dtype in (torch.bfloat16, torch.float32):
        assert buckets.check((256, 1024, torch.bfloat16, out_dtype), device) == []


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_op_runs_the_kernel(dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(4, "cuda"))
    with dispatch.force("reference"):
        expected = matmul(**arguments, scale=0.5).double()
    x, w = (value.double() for value in arguments.values())
    magnitude = x.abs() @ w.abs().T
    assert_close(matmul(**arguments, scale=0.5), expected, ulps=1, noise=NOISE, magnitude=magnitude)


def test_tiles_fit_the_shared_memory(monkeypatch: pytest.MonkeyPatch):
    """No shape needs more than a small GPU has; only depth and stages change."""
    device = torch.device("cpu")
    for limit in (95 << 10, 160 << 10, 220 << 10):
        monkeypatch.setattr(kernel, "shared_bytes", lambda _, limit=limit: limit)
        for dtype in (torch.bfloat16, torch.float32):
            for m in (1, 17, 64, 100, 300, 9000):
                for n in (1, 258, 4096, 13312, 200058):
                    tile = kernel.tile_for(m, n, dtype, 132)
                    fitted = kernel.fitted(tile, dtype, device)
                    assert tile._replace(depth=fitted.depth, stages=fitted.stages) == fitted
                    rows = fitted.rows + fitted.columns
                    assert rows * fitted.depth * dtype.itemsize * fitted.stages <= limit
                    if limit == 220 << 10:
                        assert fitted == tile


def row_by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([(row * w).sum(-1) for row in x])


class Products:
    """Stands for the library, on a CPU: our products, but for `wrong` buckets, of which one row is
    another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *wrong: tuple[int, int]) -> None:
        self.wrong = dict(wrong)
        self.asked: list[int] = []
        monkeypatch.setattr(buckets, "BUCKETS", (64, 32, 24, 16, 8))
        monkeypatch.setattr(buckets, "PART", 16)
        monkeypatch.setattr(buckets, "vendor", self)
        monkeypatch.setattr(kernel, "ours", lambda x, w, scale, dtype: row_by_row(x, w).to(dtype))

    def __call__(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        self.asked.append(len(x))
        out.copy_(row_by_row(x, w))
        if len(x) in self.wrong:
            out[self.wrong[len(x)], -1] += 1.0


def test_the_self_test_finds_a_wrong_row_in_every_part(monkeypatch: pytest.MonkeyPatch):
    device, shape = torch.device("cpu"), (40, 32, torch.float32, torch.float32)
    Products(monkeypatch)
    assert buckets.check(shape, device) == [64, 32, 24, 16, 8]
    for bucket in (64, 24, 8):
        for row in (0, 7, 15, 16, 23, 40, 63):
            if row < bucket:
                Products(monkeypatch, (bucket, row))
                assert buckets.check(shape, device) == [b for b in buckets.BUCKETS if b != bucket]
    rows = Products(monkeypatch, (64, 63), (32, 0))
    assert buckets.check(shape, device) == [24, 16, 8]
    assert rows.asked == [64, 32, 24, 16, 8] + 2 * [24, 16, 8], "refused for good"


def test_without_memory_for_the_test_the_library_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step goes on with our product, and another process may test."""

    def full(shape: object, device: object) -> list[int]:
        raise torch.OutOfMemoryError("all is used")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(buckets, "fingerprint", lambda device: {"gpu": "full"})
    monkeypatch.setattr(buckets, "check", full)
    monkeypatch.setattr(buckets, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 0)
    given = (64, 128, torch.bfloat16, torch.bfloat16, device)
    assert buckets.equal_buckets(*given) == ()
    monkeypatch.setattr(buckets, "check", lambda *_: [64])
    assert buckets.equal_buckets(*given) == (), "once is enough for a process"
    monkeypatch.setattr(buckets, "_found", {})
    assert buckets.equal_buckets(*given) == (64,)


def test_runs_of_tested_buckets():
    equal = (8192, 2048, 1024, 96)
    assert buckets.runs(1023, equal) == []
    assert buckets.runs(96, equal) == [96]
    assert buckets.runs(97, equal) == buckets.runs(192, equal) == []
    assert buckets.runs(2048 + 96, equal) == [2048, 96]
    assert buckets.runs(4096, equal) == [2048, 2048]
    assert buckets.runs(2 * 8192 + 3079, equal) == [8192, 8192, 2048, 1024]
    assert buckets.runs(5000, ()) == []


def test_torn_and_foreign_results_are_not_believed():
    mine: dict[str, object] = {"gpu": "a", "torch": "1"}
    good = {"fingerprint": mine, "equal": {"1 x 2": [1024], "3 x 4": []}}
    assert buckets.parsed(good, mine) == {"1 x 2": [1024], "3 x 4": []}
    assert buckets.parsed(good | {"fingerprint": {**mine, "torch": "2"}}, mine) == {}
    for broken in (None, [], {}, {"fingerprint": mine}, good | {"equal": [1]}):
        assert buckets.parsed(broken, mine) == {}
    wrong = {"a": [1000], "b": "1024", "c": [True], "d": [1024]}
    assert buckets.parsed(good | {"equal": wrong}, mine) == {"d": [1024]}


def test_results_are_read_back_and_a_torn_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(buckets, "fingerprint", lambda device: {"gpu": str(device)})
    device = torch.device("cuda", 0)
    assert buckets._read(device) == {}
    buckets._write(device, {"1 x 2": [2048]})
    assert buckets._read(device) == {"1 x 2": [2048]}
    assert buckets._read(torch.device("cuda", 1)) == {}
    (file,) = (tmp_path / "suzuri" / "matmul").iterdir()
    file.write_text(file.read_text()[:-9])
    assert buckets._read(device) == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    buckets._write(device, {"1 x 2": [2048]})
    assert buckets._read(device) == {}
