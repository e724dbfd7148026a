"""The compiled loops of the CPU: the order of their sums, exp, roundings, and that torch alone has
the same bits where they cannot run."""

import errno
import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from suzuri.kernels import compiled, exact, loops
from suzuri.kernels.arrays import array, lasting
from tests.kernels.compare import assert_same_bits, each_low_dtype, generator, threads
from tests.kernels.forward_ops import FORWARD_OPS, Draw
from tests.kernels.rows import LAYOUTS, TOTAL
from tests.kernels.test_cpu_paths import tuple_of

ROOT = Path(__file__).parents[2]
SHAPES = [
    *((1, 1, 1), (4, 4, 4), (5, 7, 3), (70, 203, 130)),
    *((3, 1025, 601), (9, 64, 1030), (8, 3, 512)),
]


def in_python(x: Tensor, w: Tensor) -> list[list[float]]:
    """The definition: one product and one sum at a time, K in order, in fp64."""
    found: list[list[float]] = []
    for row in x.tolist():
        line: list[float] = []
        for column in w.tolist():
            total = 0.0
            for a, b in zip(row, column, strict=True):
                total += a * b
            line.append(total)
        found.append(line)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_walks_k_in_order(shape: tuple[int, int, int], dtype: torch.dtype):
    m, k, n = shape
    x = torch.randn(m, k, generator=generator(1)).to(dtype)
    w = torch.randn(n, k, generator=generator(2)).to(dtype)
    found = exact.accumulators(x, w)
    rows, columns = slice(0, 3), slice(max(n - 4, 0), n)
    expected = torch.tensor(in_python(x[rows], w[columns]), dtype=torch.float64)
    assert_same_bits(found[rows, columns], expected)
    assert_same_bits(found, exact._in_order(x, w))
    for num_threads in (1, 2):
        with threads(num_threads), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops, "SMALL_PRODUCT", 0)
            patch.setattr(compiled, "SMALL_PRODUCT", 0)
            assert_same_bits(exact.accumulators(x, w), found, f"{num_threads} threads")


def test_rows_that_cancel_and_numbers_that_are_none():
    x = torch.tensor([[2.0**60, 1.0, -(2.0**60)], [math.inf, 1.0, -math.inf], [math.nan, 0.0, 1.0]])
    w = torch.ones(1, 3)
    found = exact.accumulators(x, w)[:, 0].tolist()
    assert found[0] == (2.0**60 + 1.0) - 2.0**60
    assert math.isnan(found[1]) and math.isnan(found[2])


def every_kind_of_number() -> Tensor:
    g = generator(3)
    wide = torch.randn(40_000, generator=g) * torch.logspace(-40, 2.5, 40_000)
    edges = [0.0, -0.0, math.inf, -math.inf, -1e30, 88.72, 88.73, 89.0, -87.33, -87.34, -103.9]
    edges += [-104.0, -150.0, -151.0, 3e38, -3e38, 1e-45]
    return torch.cat([wide, torch.tensor(edges)])


def test_exp_has_the_same_bits_in_the_loops_and_in_torch(monkeypatch: pytest.MonkeyPatch):
    x = every_kind_of_number()
    found = exact.exp(x)
    # Alone, in a strided view and among others: no lane differs from a tail.
    assert_same_bits(torch.cat([exact.exp(x[i : i + 1]) for i in range(0, 500)]), found[:500])
    assert_same_bits(exact.exp(x[::3]), found[::3])
    monkeypatch.setattr(exact, "has_loops", lambda: False)
    assert_same_bits(exact.exp(x), found)
    assert math.isnan(exact.exp(torch.tensor([math.nan])).item())


def test_exp_is_rounded_once():
    x = every_kind_of_number().double()
    expected = torch.exp(x)
    error = (exact.exp(x.float()).double() - expected).abs()
    normal = (expected >= 2.0**-126) & (expected < 3.4e38)
    spacing = torch.ldexp(torch.ones_like(x), torch.frexp(expected).exponent - 24)
    assert (error[normal] <= 0.51 * spacing[normal]).all()
    small = expected < 2.0**-126
    assert (error[small] <= 0.51 * 2.0**-149).all()
    assert exact.exp(torch.tensor([0.0, -math.inf, -1e30, 89.0])).tolist() == [1, 0, 0, math.inf]


def test_exp_has_its_own_derivative():
    x = torch.randn(7, generator=generator(4)).requires_grad_()
    exact.exp(x).backward(torch.arange(7.0))
    assert x.grad is not None
    assert_same_bits(x.grad, torch.arange(7.0) * exact.exp(x.detach()))


def test_rounding_to_bf16_and_back_to_words():
    x = torch.cat([every_kind_of_number(), torch.tensor([math.nan, 3.39e38, 1.00390625])])
    expected = x.to(torch.bfloat16)
    rounded = np.array([loops.to_bf16(v) for v in array(x)], np.float32)
    assert_same_bits(torch.from_numpy(rounded).nan_to_num(7.0), expected.float().nan_to_num(7.0))
    place = torch.zeros(len(x), dtype=torch.bfloat16)

    @compiled.loop
    def write_and_read(place, x, back):
        compiled_put(place, x)
        for i in range(x.size):
            back[i] = compiled_number(place[i])

    compiled_put, compiled_number = compiled.put, compiled.number
    back = np.empty(len(x), np.float32)
    write_and_read(compiled.words(place), rounded, back)
    assert_same_bits(place.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert_same_bits(torch.from_numpy(back).nan_to_num(7.0), expected.float().nan_to_num(7.0))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 33, 64, 300, 4096])
def test_the_tree_is_that_of_tree_sum(length: int):
    x = torch.randn(5, length, generator=generator(length))
    found = torch.tensor([loops.tree(row.copy(), length) for row in array(x)])
    assert_same_bits(found, exact.tree_sum(x))


@each_low_dtype
@pytest.mark.parametrize("op", FORWARD_OPS)
def test_torch_alone_has_the_same_bits(
    op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Where numba is not installed."""
    run = FORWARD_OPS[op](Draw(dtype, "cpu", LAYOUTS[next(iter(LAYOUTS))]))
    rows = slice(0, TOTAL)
    found = run(rows)
    monkeypatch.setattr(exact, "has_loops", lambda: False)
    monkeypatch.setattr("suzuri.kernels.dispatch.has_loops", lambda: False)
    expected = run(rows)
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        assert_same_bits(a, b)


def test_spread_runs_every_part_once_and_passes_errors_on():
    seen: list[int] = []
    with threads(2):
        compiled.spread(compiled.SMALL_PRODUCT + 1, 7, lambda a, b: seen.extend(range(a, b)))
        assert sorted(seen) == list(range(7))

        def fails(low: int, high: int) -> None:
            if high == 7:
                raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"):
            compiled.spread(compiled.SMALL_PRODUCT + 1, 7, fails)


def test_a_lasting_view_follows_its_tensor():
    x = torch.zeros(3)
    view = lasting(x)
    assert lasting(x) is view
    x += 1
    assert lasting(x).tolist() == [1, 1, 1]
    x.data = torch.full((2,), 5.0)
    assert lasting(x).tolist() == [5, 5]


def test_nothing_is_held_of_tensors_that_are_gone():
    """A view holds its tensor: what is remembered for a tensor must not."""
    gone: list[weakref.ref[Tensor]] = []
    for shape in ((5,), (1, 7), (7, 1), (4, 3)):
        x = torch.nn.Parameter(torch.randn(shape), requires_grad=False)
        lasting(x)
        if len(shape) > 1:
            exact.transposed(x)
        gone.append(weakref.ref(x))
        del x
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_compiled_code_is_kept_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled._folder.cache_clear()
    try:

        @compiled.loop
        def twice(x):
            return 2 * x

        assert twice(21) == 42
        folder = Path(compiled._folder())
        assert folder.parent == tmp_path / "suzuri" / "loops"
        assert list(folder.rglob("*.nbi"))
    finally:
        compiled._folder.cache_clear()


def test_any_source_of_the_loops_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A changed source is never run from an old file."""
    kernels = tmp_path / "kernels"
    (kernels / "op").mkdir(parents=True)
    files = [kernels / "compiled.py", kernels / "loops.py", kernels / "op" / "cpu.py"]
    for file in files:
        file.write_text("1")
    monkeypatch.setattr(compiled, "__file__", str(files[0]))
    seen: set[str] = set()
    try:
        for file in [None, *files]:
            if file is not None:
                file.write_text("2")
            compiled._folder.cache_clear()
            seen.add(compiled._folder())
    finally:
        compiled._folder.cache_clear()
    assert len(seen) == 4 and "" not in seen


def test_loops_run_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """No folder, one that is a file, a full disk: told once, and computed all the same."""
    a_file = tmp_path / "file"
    a_file.write_text("")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for home in (a_file, tmp_path / "full"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        compiled._folder.cache_clear()
        compiled._say_once.cache_clear()
        caplog.clear()
        try:
            for _ in range(2):

                @compiled.loop
                def twice(x):
                    return 2 * x

                if home != a_file:
                    monkeypatch.setattr(compiled._cache_of(twice), "_save_overload", full)
                assert twice(21) == 42
            assert sum("cannot be kept" in line for line in caplog.messages) == 1, caplog.messages
        finally:
            compiled._folder.cache_clear()


def test_a_numba_that_cannot_be_used_is_told_and_done_without():
    """NUMBA_DISABLE_JIT, or one that does not fit the installed NumPy."""
    code = (
        "import torch\n"
        "from suzuri.kernels import exact\n"
        "x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))\n"
        "print(exact.has_loops(), exact.accumulators(x, x).sum().item())\n"
    )
    outputs: list[subprocess.CompletedProcess[str]] = []
    for disabled in ("0", "1"):
        environment = os.environ | {"NUMBA_DISABLE_JIT": disabled, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", code]
        outputs.append(
            subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        )
    assert outputs[0].stdout.split()[0] == "True" and outputs[1].stdout.split()[0] == "False"
    assert outputs[0].stdout.split()[1] == outputs[1].stdout.split()[1]
    assert "numba cannot be used (NUMBA_DISABLE_JIT is set)" in outputs[1].stderr
