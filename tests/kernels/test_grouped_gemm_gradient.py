"""grouped_gemm's own backward, and the two kernels that it has on a GPU."""

from itertools import accumulate

import pytest
import torch

from suzuri.kernels.grouped_gemm import cases, gradient, grouped_gemm
from tests.kernels.backward import (
    assert_near,
    backward_cases,
    check_backward,
    check_finite_differences,
)
from tests.kernels.compare import Arguments, assert_same_bits, generator, leaves
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.triton_interpreter import patch_loop_bounds

TRAINED = ["x_MK", "weight_EFK"]
COUNTS = (3, 0, 70, 1, 16, 17, 0, 0, 129, 64, 0)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    check_backward(grouped_gemm, arguments | {"out_dtype": dtype}, TRAINED)


def test_finite_differences():
    arguments: Arguments = cases.build("odd", torch.float64, generator(2))
    arguments["x_MK"], arguments["weight_EFK"] = (
        arguments["x_MK"][:, :5],
        arguments["weight_EFK"][:, :4, :5],
    )
    given = arguments | {"out_dtype": torch.float64}
    check_finite_differences(grouped_gemm, given, TRAINED)


def test_of_a_bf16_weight_in_fp32_and_zeros_where_no_rows_are():
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(3))
    given = leaves(arguments, TRAINED)
    given["weight_EFK"].grad_dtype = torch.float32
    grad = torch.randn(11, 48, generator=generator(4))
    grouped_gemm(**given, out_dtype=torch.float32).backward(grad)
    found, x = given["weight_EFK"].grad, arguments["x_MK"].double()
    assert found.dtype == torch.float32
    assert_near(found[2], grad.double()[3:10].T @ x[3:10], 1e-6, "expert 2")
    assert_same_bits(found[1], torch.zeros_like(found[1]), "expert 1")
    assert given["x_MK"].grad.dtype == torch.bfloat16


def test_no_rows_at_all():
    arguments: Arguments = cases.build("odd", torch.float32, generator(5))
    arguments |= {"x_MK": arguments["x_MK"][:0], "offsets_E1": torch.zeros(4, dtype=torch.int64)}
    given = leaves(arguments, TRAINED)
    grouped_gemm(**given, out_dtype=torch.float32).sum().backward()
    for name in TRAINED:
        assert_same_bits(given[name].grad, torch.zeros_like(arguments[name]), name)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_kernels_in_every_tile(
    monkeypatch: pytest.MonkeyPatch, device: str, case: str, dtype: torch.dtype
):
    pytest.importorskip("triton")
    from suzuri.kernels.grouped_gemm import kernel
    from suzuri.kernels.matmul.kernel import Tile

    patch_loop_bounds(monkeypatch)
    arguments: Arguments = cases.build(case, dtype, generator(6, device))
    x, weight, offsets = arguments["x_MK"], arguments["weight_EFK"], arguments["offsets_E1"]
    grad = torch.randn(len(x), weight.shape[1], generator=generator(7, device), device=device)
    grad = grad.to(dtype)
    wide = [t.double().cpu() for t in (grad, weight, x)]
    of_inputs = gradient.of_inputs(wide[0], wide[1], offsets.cpu())
    of_weights = gradient.of_weights(wide[0], wide[2], offsets.cpu())
    for tile in (None, Tile(16, 32, 16, 4, 2), Tile(32, 16, 32, 4, 2)):
        with nan_filled():
            found = kernel.of_inputs(grad, weight, offsets, tile)
            found_weights = kernel.of_weights(grad, x, offsets, tile)
        assert found.dtype == found_weights.dtype == torch.float32
        assert_near(found.cpu(), of_inputs, 1e-5, f"inputs, {tile}")
        assert_near(found_weights.cpu(), of_weights, 1e-5, f"weights, {tile}")


@in_interpreter
def test_kernels_without_rows(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from suzuri.kernels.grouped_gemm import kernel

    patch_loop_bounds(monkeypatch)
    none, offsets = torch.zeros(0, 13), torch.zeros(4, dtype=torch.int64)
    assert kernel.of_inputs(none, torch.ones(3, 13, 45), offsets).shape == (0, 45)
    found = kernel.of_weights(none, torch.zeros(0, 45), offsets)
    assert_same_bits(found, torch.zeros(3, 13, 45))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_experts_of_very_different_sizes_in_equal_bits_and_without_a_sync(dtype: torch.dtype):
    from tests.kernels.row_kernels import without_sync

    g = generator(8, "cuda")
    x = torch.randn(sum(COUNTS), 520, generator=g, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(len(COUNTS), 258, 520, generator=g, device="cuda").to(dtype)
    weight.requires_grad_().grad_dtype = torch.float32
    offsets = torch.tensor([0, *accumulate(COUNTS)], device="cuda")
    grad = torch.randn(len(x), 258, generator=g, device="cuda").to(dtype)
    found: list[tuple[torch.Tensor, ...]] = []
    for _ in range(3):
        out = grouped_gemm(x, weight, offsets, out_dtype=dtype)
        with without_sync():
            found.append(torch.autograd.grad(out, (x, weight), grad))
    for again in found[1:]:
        for a, b in zip(again, found[0], strict=True):
            assert_same_bits(a, b)
    wide = [t.detach().double().cpu() for t in (grad, weight, x)]
    expected = gradient.of_inputs(wide[0], wide[1], offsets.cpu())
    assert_near(found[0][0].cpu(), expected, 1e-5 if dtype == torch.float32 else 1e-2, "x")
    expected = gradient.of_weights(wide[0], wide[2], offsets.cpu())
    assert_near(found[0][1].cpu(), expected, 1e-5, "weight")
