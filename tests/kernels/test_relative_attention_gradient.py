"""The explicit gradient of relative_attention against the reference's own, on every path: compiled
loops (fp32 and bf16 on a CPU), blocks of rows in torch (fp64, and any GPU).
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import dispatch, exact
from suzuri.kernels.relative_attention import cases, gradient, relative_attention
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    check_gradients,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    leaves,
    threads,
    widened,
)
from tests.kernels.paging import Rows, random_proj, random_rows

TRAINED = ["q_NHC", "k_NUC", "v_NUC", "r_NHB", "proj_BE"]
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the norm; in bf16 the gradients themselves are rounded."""
SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]
each_path = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "loops"])


def packed(sequences: list[Rows], proj: Tensor, window: int | None, *, extra: int = 0) -> Arguments:
    """Arguments for several sequences, and `extra` rows of NaN that belong to none."""
    lengths = [len(rows.q) for rows in sequences]
    nan = [Rows(*(x.new_full((extra, *x.shape[1:]), torch.nan) for x in sequences[0]))]
    q, k, v, r = (torch.cat(parts) for parts in zip(*sequences, *nan, strict=True))
    return {
        "q_NHC": q,
        "k_NUC": k,
        "v_NUC": v,
        "r_NHB": r,
        "proj_BE": proj,
        "seq_starts_S1": torch.tensor([0, *lengths], device=q.device).cumsum(0),
        "window": window,
    }


def ragged(dtype: torch.dtype, lengths: list[int]) -> tuple[list[Rows], Tensor]:
    rows = [random_rows(n, kv_heads=2, dtype=dtype, seed=i) for i, n in enumerate(lengths)]
    return rows, random_proj(11, rows[0])


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for name, a, b in zip(TRAINED, found, expected, strict=True):
        assert a.shape == b.shape, name
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error < bound, (name, error)


def of_the_reference(arguments: Arguments) -> list[Tensor]:
    with dispatch.force("reference"):
        return gradients(relative_attention, widened(arguments), TRAINED)


@each_dtype
@pytest.mark.parametrize("case", SMALL)
def test_against_the_reference(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1))
    found = gradients(relative_attention, arguments, TRAINED)
    assert [grad.dtype for grad in found] == [dtype] * 5
    assert_near(found, of_the_reference(arguments), BOUND[dtype])


@pytest.mark.gpu
@each_low_dtype
@pytest.mark.parametrize("case", SMALL)
def test_on_a_gpu_against_the_reference(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, "cuda"))
    found = gradients(relative_attention, arguments, TRAINED)
    assert_near(found, of_the_reference(arguments), BOUND[dtype])
    again = gradients(relative_attention, arguments, TRAINED)
    for name, a, b in zip(TRAINED, found, again, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("window", [None, 3])
def test_finite_differences(window: int | None):
    sequences = [
        random_rows(n, kv_heads=1, channels=2, width=2, dtype=torch.float64, seed=n) for n in (4, 1)
    ]
    arguments = packed(sequences, random_proj(3, sequences[0]), window)
    check_gradients(relative_attention, arguments, TRAINED)


@pytest.mark.parametrize("scores", [1, 1 << 15, 1 << 18, 1 << 24])
@pytest.mark.parametrize("window", [None, 9, 65, 200])
def test_blocks_of_rows_in_any_chunks(
    window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
):
    """However many blocks of rows share a product; sequences that begin anywhere in a block."""
    monkeypatch.setattr(gradient, "SCORES_CPU", scores)
    sequences, proj = ragged(torch.float64, [3, 70, 0, 1, 300, 64, 20])
    arguments = packed(sequences, proj, window)
    found = gradients(relative_attention, arguments, TRAINED)
    assert_near(found, of_the_reference(arguments), 1e-10)


@pytest.mark.skipif(not exact.has_loops(), reason="numba is not there")
@pytest.mark.parametrize("window", [None, 9, 65, 200])
def test_loops_over_ragged_sequences(window: int | None):
    sequences, proj = ragged(torch.float32, [3, 70, 0, 1, 300, 64, 20])
    arguments = packed(sequences, proj, window)
    found = gradients(relative_attention, arguments, TRAINED)
    assert_near(found, of_the_reference(arguments), 1e-5)


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", SMALL)
@each_low_dtype
def test_the_forward_has_the_bits_of_one_without_a_gradient(
    device_type: str, case: str, dtype: torch.dtype
):
    arguments: Arguments = cases.build(case, dtype, generator(2, device_type))
    out = relative_attention(**leaves(arguments, TRAINED))
    assert out.requires_grad
    assert_same_bits(out.detach(), relative_attention(**arguments))


@each_dtype
@pytest.mark.parametrize("window", [None, 30])
def test_equal_bits_from_run_to_run_on_any_number_of_threads(
    window: int | None, dtype: torch.dtype
):
    sequences, proj = ragged(dtype, [300, 7, 130, 250])
    arguments = packed(sequences, proj, window)
    expected = gradients(relative_attention, arguments, TRAINED)
    # The library's products, of the torch path, are promised no more than equal runs.
    for count in (1, 2) if dtype != torch.float64 else (torch.get_num_threads(),):
        with threads(count):
            found = gradients(relative_attention, arguments, TRAINED)
        for name, a, b in zip(TRAINED, found, expected, strict=True):
            assert_same_bits(a, b, f"{name}, {count} threads")


@each_path
@pytest.mark.parametrize("window", [None, 30])
def test_a_sequence_does_not_depend_on_its_neighbours(window: int | None, dtype: torch.dtype):
    sequences, proj = ragged(dtype, [33, 150, 2, 90])
    before = gradients(relative_attention, packed(sequences[1:2], proj, window), TRAINED)

    def of_the_second(**arguments: Any) -> Tensor:
        """Zeros where the rows of the others were: their gradient is not to be seen."""
        return relative_attention(**arguments)[33:183]

    together = gradients(of_the_second, packed(sequences, proj, window), TRAINED)
    for name, a, b in zip(TRAINED[:4], together, before, strict=False):
        error = float((a[33:183] - b).norm() / b.norm())
        assert error < 1e-6, (name, error)
        others = torch.cat([a[:33], a[183:]])
        assert_same_bits(others.abs(), torch.zeros_like(others), name)
    assert float((together[4] - before[4]).norm() / before[4].norm()) < 1e-6


@each_path
def test_only_what_is_asked_for(dtype: torch.dtype):
    arguments: Arguments = cases.build("odd_local", dtype, generator(3))
    every = dict(zip(TRAINED, gradients(relative_attention, arguments, TRAINED), strict=True))
    for count in (1, 2, 4):
        for names in combinations(TRAINED, count):
            found = gradients(relative_attention, arguments, names)
            for name, grad in zip(names, found, strict=True):
                assert_same_bits(grad, every[name], name)


@each_path
def test_empty_sequences_and_rows_of_no_sequence(dtype: torch.dtype):
    """Such rows may hold NaN, and what they are given back is of no account."""
    sequences, proj = ragged(dtype, [0, 5, 0, 3, 0])
    arguments = packed(sequences, proj, None, extra=70)
    found = gradients(relative_attention, arguments, TRAINED)
    real = packed([sequences[1], sequences[3]], proj, None)
    expected = gradients(relative_attention, real, TRAINED)
    for name, a in zip(TRAINED[:4], found, strict=False):
        assert_same_bits(a[8:], torch.zeros_like(a[8:]), name)
    assert_near([*(a[:8] for a in found[:4]), found[4]], expected, 1e-6)


@each_path
def test_no_rows(dtype: torch.dtype):
    sequences, proj = ragged(dtype, [0, 0])
    arguments = leaves(packed(sequences, proj, None), TRAINED)
    relative_attention(**arguments).sum().backward()
    for name in TRAINED:
        grad = arguments[name].grad
        assert grad is not None
        assert_same_bits(grad, torch.zeros_like(grad), name)


@each_path
def test_strided_inputs_and_gradients(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny_global", dtype, generator(4))
    expected = gradients(relative_attention, arguments, TRAINED)
    strided = {name: arguments[name].mT.contiguous().mT for name in TRAINED}

    def turned(**given: Any) -> Tensor:
        return relative_attention(**given).mT.contiguous().mT

    for op in (relative_attention, turned):
        found = gradients(op, changed(arguments, **strided), TRAINED)
        for name, a, b in zip(TRAINED, found, expected, strict=True):
            assert_same_bits(a, b, name)


@each_path
def test_recomputed_in_a_checkpoint(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny_local", dtype, generator(5))
    expected = gradients(relative_attention, arguments, TRAINED)

    def op(**given: Any) -> Tensor:
        return checkpoint(relative_attention, use_reentrant=False, **given)

    for name, a, b in zip(TRAINED, gradients(op, arguments, TRAINED), expected, strict=True):
        assert_same_bits(a, b, name)


def test_the_gradient_of_a_bf16_bank_can_be_had_in_fp32():
    arguments: Arguments = cases.build("tiny_global", torch.bfloat16, generator(6))
    arguments = leaves(arguments, TRAINED)
    proj = arguments["proj_BE"]
    proj.grad_dtype = torch.float32
    out = relative_attention(**arguments)
    out.backward(torch.ones_like(out))
    assert proj.grad is not None
    assert proj.grad.dtype == torch.float32
    assert (proj.grad.bfloat16() != proj.grad).any()
