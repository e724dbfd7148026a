"""The arithmetic primitives against exact sums and plain loops."""

import math

import pytest
import torch
from torch import Tensor

from suzuri.kernels import exact
from tests.kernels.compare import (
    FP32_EPS,
    assert_close,
    assert_same_bits,
    check_gradients,
    each_dtype,
    each_low_dtype,
    generator,
)

LENGTHS = [*range(1, 20), 31, 32, 33, 127, 300, 4095, 4096, 4097, 8192, 9001]


def tree(values: list[float]) -> float:
    """The sum by its definition: pad with zeros to a power of two, add the halves, repeat."""
    size = 1 << (len(values) - 1).bit_length()
    values = values + [0.0] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def folded(values: list[float]) -> float:
    """Trees of 4096 values, added in order."""
    total = tree(values[:4096])
    for start in range(4096, len(values), 4096):
        total += tree(values[start : start + 4096])
    return total


@pytest.mark.parametrize("length", LENGTHS)
def test_tree_sum_is_the_fixed_tree(device: str, length: int):
    """Python floats are fp64: the same additions in the same order give the same bits."""
    x = torch.randn(length, generator=generator(length), dtype=torch.float64)
    found = float(exact.tree_sum(x.to(device)))
    assert found == folded(x.tolist())
    assert found == pytest.approx(math.fsum(x.tolist()), abs=1e-11)


@each_low_dtype
def test_tree_sum_of_rows(device: str, dtype: torch.dtype):
    x = torch.randn(3, 5, 77, generator=generator(1, device), device=device).to(dtype)
    found = exact.tree_sum(x)
    assert found.dtype == dtype
    noise = 7 * 2.0 ** (-24 if dtype == torch.float32 else -8)
    assert_close(found, x.double().sum(-1), magnitude=x.double().abs().sum(-1), noise=noise)


def test_tree_sum_of_nothing_and_its_gradient(device: str):
    assert_same_bits(exact.tree_sum(torch.ones(3, 0, device=device)), torch.zeros(3, device=device))
    x = torch.randn(2, 7, generator=generator(2), dtype=torch.float64)
    check_gradients(exact.tree_sum, {"x": x}, ["x"])
    long = torch.ones(2, 5000, device=device, requires_grad=True)
    exact.tree_sum(long).backward(torch.tensor([2.0, 3.0], device=device))
    assert long.grad is not None
    assert_same_bits(long.grad, torch.tensor([[2.0], [3.0]], device=device).expand(2, 5000))


@each_dtype
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (9, 130, 2), (3, 257, 2050)], ids=str)
def test_accumulate_rounds_the_exact_product_once(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype
):
    m, k, n = shape
    g = generator(3, device)
    x = torch.randn(m, k, generator=g, device=device).to(dtype)
    w = torch.randn(n, k, generator=g, device=device).to(dtype)
    found = exact.accumulate(x, w)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for i, j in {(0, 0), (m - 1, n - 1), (m // 2, n // 2)}:
        terms = [a * b for a, b in zip(x[i].tolist(), w[j].tolist(), strict=True)]
        expected = torch.tensor([math.fsum(terms)], dtype=torch.float64)
        size = torch.tensor([math.fsum(map(abs, terms))], dtype=torch.float64)
        assert_close(found[i, j : j + 1].cpu(), expected, magnitude=size)


def test_accumulate_cancels_like_fp64_and_not_like_fp32(device: str):
    x = torch.tensor([[2.0**30, 1.0, -(2.0**30)]], device=device)
    assert exact.accumulate(x, torch.ones(1, 3, device=device)).tolist() == [[1.0]]


def test_accumulate_over_leading_dims(device: str):
    g = generator(4, device)
    x = torch.randn(2, 3, 5, 40, generator=g, device=device)
    w = torch.randn(2, 3, 9, 40, generator=g, device=device)
    found = exact.accumulate(x, w)
    expected = torch.einsum("abmk,abnk->abmn", x.double(), w.double())
    assert_close(found, expected, magnitude=torch.full_like(expected, 100.0))
    for a in range(2):
        for b in range(3):
            assert_same_bits(exact.accumulate(x[a, b], w[a, b]), found[a, b])


def test_accumulate_of_nothing(device: str):
    one = torch.ones(4, 3, device=device)
    assert exact.accumulate(one[:0], one).shape == (0, 4)
    assert exact.accumulate(one, one[:0]).shape == (4, 0)
    assert_same_bits(exact.accumulate(one[:, :0], one[:, :0]), torch.zeros(4, 4, device=device))


def test_accumulate_gradients_are_those_of_finite_differences():
    g = generator(5)
    x = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    w = torch.randn(2, 2, 4, generator=g, dtype=torch.float64)
    check_gradients(exact.accumulate, {"x": x, "w": w}, ["x", "w"])


@each_dtype
def test_segment_sum_adds_the_rows_of_each_value(device: str, dtype: torch.dtype):
    for rows, values in ((1, 1), (7, 3), (64, 1), (65, 200), (130, 5)):
        g = generator(rows, device)
        segment = torch.randint(values, (rows,), generator=g, device=device)
        x = torch.randn(rows, 3, generator=g, device=device).to(dtype)
        found, sums = exact.segment_sum(x, segment)
        assert found.tolist() == sorted(set(segment.tolist()))
        assert sums.dtype == dtype
        for value, total in zip(found.tolist(), sums, strict=True):
            own = x[segment == value].double()
            noise = {8: 2.0**-48, 4: 8 * FP32_EPS, 2: 8 * 2.0**-8}[x.element_size()]
            assert_close(total, own.sum(0), magnitude=own.abs().sum(0), noise=noise)


def test_segment_sum_is_exact_on_integers_and_keeps_other_segments_bits(device: str):
    x = torch.arange(1000.0, device=device)[:, None] + 1
    segment = torch.arange(1000, device=device) % 7
    found, sums = exact.segment_sum(x, segment)
    assert found.tolist() == list(range(7))
    assert sums[:, 0].tolist() == [sum(range(1 + s, 1001, 7)) for s in range(7)]
    noisy = torch.randn(50, 4, generator=generator(6, device), device=device)
    odd = torch.arange(50, device=device) % 2 == 1
    every = exact.segment_sum(noisy, odd.long())[1][1]
    # The scan of one segment does not see how long the others are.
    assert_same_bits(exact.segment_sum(noisy[odd], odd[odd].long())[1][0], every)


def test_segment_sum_of_nothing(device: str):
    empty = torch.zeros(0, 3, device=device)
    found, sums = exact.segment_sum(empty, torch.zeros(0, dtype=torch.int64, device=device))
    assert (found.shape, sums.shape) == ((0,), (0, 3))


@pytest.mark.parametrize("k", [1, 3, 20, 64])
def test_top_k_is_stable(device: str, k: int):
    """Many ties: 64 numbers of 5 values. torch.topk promises no order among them."""
    x = torch.randint(5, (40, 64), generator=generator(7, device), device=device).float()
    for row, found in zip(x.tolist(), exact.top_k(x, k).tolist(), strict=True):
        assert found == sorted(range(64), key=lambda i, row=row: (-row[i], i))[:k]


def test_top_k_ties_of_zeros_and_infinities(device: str):
    x = torch.tensor([[0.0, -0.0, 0.0], [-torch.inf, 1.0, -torch.inf]], device=device)
    assert exact.top_k(x, 3).tolist() == [[0, 1, 2], [1, 0, 2]]


EXTREMES = [-1e30, -1000.0, -104.0, -89.0, -88.0, -17.0, -1e-30, 0.0, 1.0, 17.0, 89.0, 1e30]


@pytest.mark.parametrize("function", ["sigmoid", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extremes(device: str, function: str, dtype: torch.dtype):
    """Values and derivatives against the library in fp64; below 1e-36 fp32 may flush to 0."""
    x = torch.tensor(EXTREMES, dtype=dtype, device=device).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y: Tensor = getattr(exact, function)(x)
    expected: Tensor = getattr(torch.nn.functional, function)(wide)
    floor, ones = (0.0, torch.ones_like(wide))
    if dtype == torch.float32:
        floor = 1e-36
    assert_close(y, expected.detach(), ulps=4, noise=floor, magnitude=ones)
    y.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    # 1 - sigmoid cancels on the right, in absolute size of one rounding of 1.
    rounding = 4 * (FP32_EPS if dtype == torch.float32 else 2.0**-53)
    size = ones * torch.where(wide.detach() > 0, wide.detach().clamp(1, 100), 0) + 1e-30
    assert_close(x.grad, wide.grad, ulps=200, noise=rounding, magnitude=size)


@pytest.mark.parametrize("function", [exact.sigmoid, exact.silu])
def test_sigmoid_and_silu_gradients_are_those_of_finite_differences(function):
    check_gradients(function, {"x": torch.linspace(-4, 4, 9, dtype=torch.float64)}, ["x"])


def test_the_arithmetic_dtype(device: str):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert exact.widen(torch.ones(1, dtype=dtype, device=device)).dtype == torch.float32
    assert exact.widen(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
