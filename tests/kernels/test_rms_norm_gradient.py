"""rms_norm's backward against the reference's, and the kernel that it has on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.rms_norm import cases, gradient, rms_norm
from tests.kernels.backward import (
    assert_near,
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    each_low_dtype,
    generator,
    threads,
    widened,
)
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.triton_interpreter import patch_loop_bounds

NAMES = ("x_ND", "weight_D")
EPS = 1e-6
BOTH = (True, True)
OPTIONS: list[Arguments] = [
    *({"num_warps": 1}, {"num_warps": 8}, {"needs_x": False}, {"needs_weight": False}),
]
WIDE = [name for name in cases.SHAPES if name != "one"]


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(WIDE))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    check_backward(rms_norm, arguments | {"eps": 1e-6}, NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["head"]))
def test_heads_unrounded_with_a_wider_weight(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    wide = torch.promote_types(dtype, torch.float32)
    weight = arguments["weight_D"].to(wide)
    arguments = {"x_ND": arguments["x_ND"].unflatten(0, (6, 4)), "weight_D": weight}
    check_backward(rms_norm, arguments | {"eps": 1e-2, "out_dtype": wide}, NAMES)


@each_low_dtype
def test_rows_of_one_number_hardly_change(dtype: torch.dtype):
    """y is then near the sign of x: what is left of the gradient is smaller than its terms."""
    arguments: Arguments = cases.build("one", dtype, generator(9)) | {"eps": 1e-6}
    grad = backward(rms_norm, arguments, NAMES)[1]["x_ND"]
    exact = backward(rms_norm, widened(arguments), NAMES)[1]["x_ND"]
    size = (arguments["weight_D"] / arguments["x_ND"]).abs().double()
    assert ((grad - exact).abs() <= 1e-6 * size + 4e-3 * exact.abs()).all()


def test_finite_differences():
    x, w = torch.randn(2, 3, 5, generator=generator(3), dtype=torch.float64)
    check_finite_differences(rms_norm, {"x_ND": x, "weight_D": w[0], "eps": 1e-3}, NAMES)


def on_kernel(
    x_ND: Tensor, weight_D: Tensor, grad_ND: Tensor, eps: float = EPS, **options: Any
) -> dict[str, Tensor]:
    """The gradients by the kernel, in memory that was filled with NaN."""
    pytest.importorskip("triton")
    from suzuri.kernels.rms_norm import kernel

    with nan_filled():
        grads = kernel.rms_norm_backward(x_ND, weight_D, eps, grad_ND, **options)
    return {name: g for name, g in zip(NAMES, grads, strict=True) if g is not None}


def in_fp64(x_ND: Tensor, weight_D: Tensor, grad_ND: Tensor, eps: float = EPS) -> list[Tensor]:
    x, weight, grad = (t.double().cpu() for t in (x_ND, weight_D, grad_ND))
    grads = gradient._backward(x, weight, eps, grad, BOTH)
    return [g for g in grads if g is not None]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    patch_loop_bounds(monkeypatch)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(WIDE))
def test_kernel_in_every_launch(device: str, case: str, dtype: torch.dtype):
    """Near fp64, and in equal bits with other warps and where less is needed."""
    given: Arguments = cases.build(case, dtype, generator(10, device))
    grad = torch.randn(given["x_ND"].shape, generator=generator(11, device), device=device)
    given["grad_ND"] = grad.to(dtype)
    found = on_kernel(**given)
    for name, expected in zip(NAMES, in_fp64(**given), strict=True):
        low = name == "x_ND" and dtype == torch.bfloat16
        assert found[name].dtype == (dtype if low else torch.float32)
        assert_near(found[name].cpu(), expected, 5e-3 if low else 3e-6, name)
    for options in OPTIONS:
        for name, other in on_kernel(**given, **options).items():
            assert_same_bits(other, found[name], f"{name}, {options}")


@in_interpreter
@pytest.mark.usefixtures("loops")
def test_kernel_of_rows_of_one_number():
    given: Arguments = cases.build("one", torch.float32, generator(9))
    given["grad_ND"] = torch.randn(3, 1, generator=generator(12))
    found, (grad_x, grad_weight) = on_kernel(**given), in_fp64(**given)
    size = (given["grad_ND"] * given["weight_D"] / given["x_ND"]).abs().double()
    assert ((found["x_ND"] - grad_x).abs() <= 1e-6 * size).all()
    assert_near(found["weight_D"], grad_weight, 1e-6, "weight")


KERNEL_DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=in_interpreter),
        pytest.param("cuda", torch.float32, marks=on_gpu),
        pytest.param("cuda", torch.bfloat16, marks=on_gpu),
    ],
)


@KERNEL_DEVICES
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("width", [3, 64, 130])
def test_kernel_rows_alone_have_their_bits(device: str, dtype: torch.dtype, width: int):
    """Over several parts of the weight's gradient, the last one not full."""
    count = 300 if width == 3 else 75
    x, grad = torch.randn(2, count, width, generator=generator(13)).to(device, dtype)
    weight = torch.rand(width, generator=generator(14)).to(device, dtype)
    whole = on_kernel(x, weight, grad)
    expected_x, expected_weight = in_fp64(x, weight, grad)
    assert_near(whole["x_ND"].cpu(), expected_x, 3e-6 if dtype == torch.float32 else 5e-3, "x")
    assert_near(whole["weight_D"].cpu(), expected_weight, 3e-6, "weight")
    for first, last in ((0, 1), (1, 2), (7, 40), (count - 1, count)):
        rows = slice(first, last)
        alone = on_kernel(x[rows], weight, grad[rows])
        assert_same_bits(alone["x_ND"], whole["x_ND"][rows], f"{first} to {last}")


@KERNEL_DEVICES
@pytest.mark.usefixtures("loops")
def test_kernel_of_heads_and_gradients_where_they_lie(device: str, dtype: torch.dtype):
    fused = torch.randn(5, 3 * 4 * 16 + 7, generator=generator(15)).to(device, dtype)
    weight = torch.rand(32, generator=generator(16)).to(device, dtype)[::2]
    x = fused[:, 16 : 16 + 2 * 4 * 16].reshape(5, 2, 4, 16)[:, 1]
    grad = torch.randn(4, 16, 5, generator=generator(17)).to(device, dtype).permute(2, 0, 1)
    expected = on_kernel(x.contiguous(), weight.contiguous(), grad.contiguous())
    ways = [(x, grad), (x.flatten(0, 1), grad.flatten(0, 1)), (x[None], grad[None])]
    for a, b in ways:
        assert not a.is_contiguous() or a.dim() == 2
        found = on_kernel(a, weight, b)
        assert found["x_ND"].shape == a.shape
        assert_same_bits(found["x_ND"].reshape(x.shape), expected["x_ND"])
        assert_same_bits(found["weight_D"], expected["weight_D"])
    of_sum = torch.ones((), device=device, dtype=dtype).expand(x.shape)
    for name, value in on_kernel(x, weight, of_sum.contiguous()).items():
        assert_same_bits(on_kernel(x, weight, of_sum)[name], value, name)


@in_interpreter
@pytest.mark.usefixtures("loops")
def test_kernel_without_eps_and_without_rows():
    """Rows that are not there add nothing even where their scale would be infinite."""
    x, grad = torch.randn(2, 5, 40, generator=generator(18))
    found, expected = on_kernel(x, x[0], grad, 0.0), in_fp64(x, x[0], grad, 0.0)
    for name, value in zip(NAMES, expected, strict=True):
        assert_near(found[name], value, 1e-6, name)
    none = on_kernel(x[:0], x[0], grad[:0])
    assert none["x_ND"].shape == (0, 40)
    assert_same_bits(none["weight_D"], torch.zeros(40))


@in_interpreter
@pytest.mark.usefixtures("loops")
def test_the_op_runs_the_kernel(monkeypatch: pytest.MonkeyPatch):
    arguments: Arguments = cases.build("odd", torch.float32, generator(19))
    x, weight = (arguments[name].requires_grad_() for name in NAMES)
    out = rms_norm(x, weight, EPS)
    grad = torch.randn(out.shape, generator=generator(20))
    expected = on_kernel(x.detach(), weight.detach(), grad)
    monkeypatch.setattr(dispatch, "use_cpu", lambda *_: False)
    monkeypatch.setattr(dispatch, "use_reference", lambda _: False)
    out.backward(grad)
    assert_same_bits(grad_of(x), expected["x_ND"])
    assert_same_bits(grad_of(weight), expected["weight_D"])


def test_kernel_refuses_fp64():
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"backward of rms_norm with torch\.float64"):
        on_kernel(x, x[0], x)


@on_gpu
@pytest.mark.parametrize("shape", [(9000, 6144), (70_000, 4, 64), (33, 8200)], ids=str)
def test_many_rows_in_equal_bits_and_without_a_sync(shape: tuple[int, ...]):
    from tests.kernels.row_kernels import without_sync

    g = generator(21, "cuda")
    x = torch.randn(shape, generator=g, device="cuda").bfloat16().requires_grad_()
    weight = torch.rand(shape[-1], generator=g, device="cuda").requires_grad_()
    grad = torch.randn(shape, generator=g, device="cuda").bfloat16()
    found: list[tuple[Tensor, ...]] = []
    for _ in range(3):
        out = rms_norm(x, weight, EPS)
        with without_sync():
            found.append(torch.autograd.grad(out, (x, weight), grad))
    for again in found[1:]:
        for a, b in zip(again, found[0], strict=True):
            assert_same_bits(a, b)
    with torch.no_grad():
        wide = (x.double(), weight.double(), EPS, grad.double())
        expected_x, expected_weight = gradient._backward(*wide, BOTH)
    assert expected_x is not None
    assert expected_weight is not None
    assert_near(found[0][0], expected_x, 5e-3, "x")
    assert_near(found[0][1], expected_weight, 1e-5, "weight")


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4)) | {"eps": 1e-6}
    check_no_rows(rms_norm, arguments | {"x_ND": arguments["x_ND"][:0]}, NAMES)


@each_low_dtype
def test_rows_longer_than_a_fold(dtype: torch.dtype):
    """Beyond exact.FOLD the forward is the reference's; the backward need not be."""
    x = torch.randn(3, 4099, generator=generator(5)).to(dtype)
    check_backward(rms_norm, {"x_ND": x, "weight_D": x[0], "eps": 1e-6}, NAMES)


def test_threads_and_neighbours():
    """Many rows are shared out to threads: the same bits. A row's gradient is its own alone, and
    that of the weight changes by rounding only when the rows come in another order."""
    x = torch.randn(7001, 60, generator=generator(6))
    arguments: Arguments = {"x_ND": x, "weight_D": x[0], "eps": 1e-6}
    found: list[dict[str, Tensor]] = []
    for count in (1, 2):
        with threads(count):
            found.append(backward(rms_norm, arguments, NAMES)[1])
    for name in NAMES:
        assert_same_bits(found[0][name], found[1][name], name)
    order = torch.randperm(7001, generator=generator(7))
    grad = torch.randn(7001, 60, generator=generator(8))
    grads: list[list[Tensor]] = []
    for rows in (torch.arange(7001), order):
        leaves = [x[rows].requires_grad_(), x[0].clone().requires_grad_()]
        rms_norm(leaves[0], leaves[1], 1e-6).backward(grad[rows])
        grads.append(list(map(grad_of, leaves)))
    assert not dispatch.is_forced()
    assert_same_bits(grads[1][0], grads[0][0][order])
    assert_near(grads[1][1], grads[0][1], 1e-6, "weight")
