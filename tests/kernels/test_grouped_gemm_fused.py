"""The grouped kernel with SwiGLU in it, with rows that are not sorted yet, and with rows of no
expert: the bits are those of the ops one after the other."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.swiglu import swiglu
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    check_gradients,
    each_dtype,
    generator,
)
from tests.kernels.on_triton import in_interpreter, nan_filled, on_gpu
from tests.kernels.triton_interpreter import patch_loop_bounds

COUNTS = {
    "tiny": (3, 0, 7, 1),
    "none but one": (0, 13, 0),
    "one expert": (5,),
    "no rows": (0, 0),
}
DEVICES = [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)]


def build(
    counts: tuple[int, ...],
    f: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    more: int = 0,
) -> Arguments:
    """Halves and whole numbers, whose sums are exact in any order; `more` rows of no expert."""
    g = generator(1)
    m = sum(counts) + more
    x = torch.randint(-3, 4, (m, k), generator=g) / 2
    weight = torch.randint(-3, 4, (len(counts), f, k), generator=g) / 4
    offsets = torch.tensor([0, *accumulate(counts)])
    return {
        "x_MK": x.to(device, dtype),
        "weight_EFK": weight.to(device, dtype),
        "offsets_E1": offsets.to(device),
    }


def apart(arguments: Arguments, out_dtype: torch.dtype) -> torch.Tensor:
    """By the kernels, one after the other."""
    from suzuri.kernels.grouped_gemm import kernel
    from suzuri.kernels.swiglu import kernel as swiglu_kernel

    gate_up = kernel.grouped_gemm(**arguments, out_dtype=torch.float32)
    return swiglu_kernel.swiglu(gate_up, out_dtype)


def run(arguments: Arguments, out_dtype: torch.dtype, **options: Any) -> torch.Tensor:
    from suzuri.kernels.grouped_gemm import kernel

    with nan_filled():
        return kernel.grouped_gemm(**arguments, out_dtype=out_dtype, **options)


def schedules(device: str, dtype: torch.dtype) -> list[Any]:
    from suzuri.kernels.grouped_gemm.tiles import Schedule
    from suzuri.kernels.matmul.kernel import Tile

    small = [
        None,
        Tile(4, 16, 32, 4, 2),
        Tile(2, 32, 16, 4, 2, True),
        Tile(8, 16, 32, 4, 2, False, True),
        Tile(16, 32, 16, 4, 2, True, True),
        Schedule(Tile(4, 16, 32, 4, 2, False, True), 2, True),
        Schedule(Tile(4, 16, 32, 4, 2, False, True), 2, halved=True, spread=True),
    ]
    if device == "cpu":
        return small
    if dtype == torch.float32:
        return [None, Tile(16, 64, 32, 4, 2, True), Tile(64, 64, 32, 4, 2)]
    return [
        None,
        Tile(16, 64, 128, 4, 4, True),
        Tile(16, 64, 128, 4, 4, True, True),
        Tile(32, 64, 128, 4, 3, True, True),
        Tile(64, 128, 64, 4, 4, False, True),
        Tile(128, 128, 64, 4, 4, False, True),
        Tile(128, 256, 64, 8, 3, False, True),
        Tile(128, 256, 64, 8, 3),
        Schedule(Tile(128, 256, 64, 8, 3, False, True), 16),
        Schedule(Tile(128, 256, 64, 8, 4, False, True), halved=True),
        Schedule(Tile(128, 128, 64, 4, 3, False, True), halved=True, spread=True),
        Schedule(Tile(128, 256, 64, 8, 3, False, True), 8, True),
        Schedule(Tile(128, 128, 64, 4, 3, False, True), 4, True),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("f", "k"), [(26, 45), (64, 64)])
def test_swiglu_in_the_product(
    monkeypatch: pytest.MonkeyPatch, device: str, counts: tuple[int, ...], f: int, k: int
):
    pytest.importorskip("triton")
    patch_loop_bounds(monkeypatch)
    for dtype in (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32):
        arguments = build(counts, f, k, dtype, device)
        for out_dtype in (torch.float32, torch.bfloat16):
            expected = apart(arguments, out_dtype)
            assert expected.shape == (sum(counts), f // 2)
            for tile in schedules(device, dtype):
                found = run(arguments, out_dtype, tile=tile, swiglu=True)
                assert_same_bits(found, expected, f"{tile}, {out_dtype}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_swiglu", [False, True], ids=["plain", "swiglu"])
def test_rows_that_are_not_sorted_yet(
    monkeypatch: pytest.MonkeyPatch, device: str, with_swiglu: bool
):
    pytest.importorskip("triton")
    patch_loop_bounds(monkeypatch)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for f, k in ((26, 45), (64, 64)):
        arguments = build((3, 0, 8, 1), f, k, dtype, device)
        order = torch.randperm(12, generator=generator(2)).to(device)
        for num_slots in (1, 4):
            rows = arguments["x_MK"][: 12 // num_slots]
            copied = changed(arguments, x_MK=rows[order // num_slots])
            expected = run(copied, dtype, swiglu=with_swiglu)
            for tile in schedules(device, dtype):
                found = run(
                    changed(arguments, x_MK=rows),
                    dtype,
                    tile=tile,
                    swiglu=with_swiglu,
                    order_M=order,
                    num_slots=num_slots,
                )
                assert_same_bits(found, expected, f"{tile}, {num_slots} slots")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("more", [1, 20])
def test_rows_of_no_expert_become_zeros(
    monkeypatch: pytest.MonkeyPatch, device: str, counts: tuple[int, ...], more: int
):
    pytest.importorskip("triton")
    patch_loop_bounds(monkeypatch)
    dtype, real = torch.float32 if device == "cpu" else torch.bfloat16, sum(counts)
    arguments = build(counts, 26, 48, dtype, device, more=more)
    arguments["x_MK"][real:] = float("nan")
    alone = changed(arguments, x_MK=arguments["x_MK"][:real])
    for with_swiglu in (False, True):
        expected = run(alone, dtype, swiglu=with_swiglu)
        for tile in schedules(device, dtype):
            found = run(arguments, dtype, tile=tile, swiglu=with_swiglu)
            assert_same_bits(found[:real], expected, f"{tile}")
            assert_same_bits(found[real:], torch.zeros_like(found[real:]), f"{tile}")


@each_dtype
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_op_on_a_cpu_is_the_composition(counts: tuple[int, ...], dtype: torch.dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = build(counts, 26, 45, dtype, more=3)
    real = sum(counts)
    order = torch.randperm(real + 3, generator=generator(3))
    sorted_ = changed(arguments, x_MK=arguments["x_MK"][order // 2])
    with dispatch.force("reference"):
        gate_up = grouped_gemm(**sorted_, out_dtype=wide)
        expected = swiglu(gate_up, out_dtype=dtype)
        again = grouped_gemm(**arguments, out_dtype=dtype, swiglu=True, order_M=order, num_slots=2)
    assert not gate_up[real:].any() and gate_up.shape == (real + 3, 26)
    found = grouped_gemm(**arguments, out_dtype=dtype, swiglu=True, order_M=order, num_slots=2)
    assert_same_bits(found, expected)
    assert_same_bits(again, expected)


def test_gradients_pass_through_the_fused_op():
    arguments = build((2, 0, 3), 4, 3, torch.float64)
    options = {"out_dtype": torch.float64, "swiglu": True}
    check_gradients(lambda **given: grouped_gemm(**given, **options), arguments, ["x_MK"])


def test_rows_that_are_not_sorted_yet_have_no_gradient():
    arguments = build((2,), 4, 4)
    arguments["x_MK"].requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        grouped_gemm(**arguments, out_dtype=torch.float32, order_M=torch.arange(2))


def test_an_odd_number_of_gate_and_up_rows_is_refused():
    with pytest.raises(ValueError, match="must be even"):
        grouped_gemm(**build((2,), 5, 4), out_dtype=torch.float32, swiglu=True)


@on_gpu
@pytest.mark.parametrize(("f", "k"), [(768, 1024), (210, 136)])
def test_hostile_rows_in_every_tile(f: int, k: int):
    from suzuri.kernels.matmul import buckets

    counts = (3, 0, 70, 1, 16, 17, 0, 0, 129, 64, 300, 0)
    g = generator(5, "cuda")
    weight = buckets.hostile_weight(len(counts) * f, k, g).bfloat16()
    arguments: Arguments = {
        "x_MK": buckets.hostile_rows(sum(counts), k, g).bfloat16(),
        "weight_EFK": weight.unflatten(0, (len(counts), f)),
        "offsets_E1": torch.tensor([0, *accumulate(counts)], device="cuda"),
    }
    order = torch.arange(sum(counts), device="cuda")
    expected = apart(arguments, torch.bfloat16)
    for tile in schedules("cuda", torch.bfloat16):
        for options in ({}, {"order_M": order}):
            found = run(arguments, torch.bfloat16, tile=tile, swiglu=True, num_shared=2, **options)
            assert_same_bits(found, expected, f"{tile}, {[*options]}")
