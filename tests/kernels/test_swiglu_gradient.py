"""swiglu's backward against the reference's, and the kernel that it has on a GPU."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.swiglu import cases, gradient, swiglu
from tests.kernels.backward import (
    assert_near,
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import Arguments, assert_same_bits, each_low_dtype, generator, threads
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled

NAMES = ("gate_up_NF2",)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    check_backward(swiglu, arguments | {"out_dtype": dtype}, NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["odd"]))
def test_a_narrower_output_and_leading_dims(device: str, case: str, dtype: torch.dtype):
    x = cases.build(case, dtype, generator(2, device))["gate_up_NF2"][None].expand(2, -1, -1)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.bfloat16
    check_backward(swiglu, {"gate_up_NF2": x, "out_dtype": out_dtype}, NAMES)


def test_finite_differences():
    x = 2 * torch.randn(3, 6, generator=generator(3), dtype=torch.float64)
    check_finite_differences(swiglu, {"gate_up_NF2": x, "out_dtype": torch.float64}, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    x = torch.zeros(0, 8, dtype=dtype)
    check_no_rows(swiglu, {"gate_up_NF2": x, "out_dtype": dtype}, NAMES)


@each_low_dtype
def test_gates_far_out(dtype: torch.dtype):
    """No NaN where exp overflows: silu is 0 and flat on one side, the gate itself on the other."""
    x = torch.tensor([[-3e38, 2.0, -200.0, 3.0, 200.0, 4.0]]).to(dtype).requires_grad_()
    swiglu(x, out_dtype=torch.float32).sum().backward()
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 4.0, 200.0]]).to(dtype)
    assert_same_bits(grad_of(x) + 0.0, expected)


def on_kernel(x: torch.Tensor, grad: torch.Tensor, block: int | None = None) -> torch.Tensor:
    pytest.importorskip("triton")
    from suzuri.kernels.swiglu import kernel

    with nan_filled():
        return kernel.swiglu_backward(x, grad, block)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_kernel_in_every_block(device: str, case: str, dtype: torch.dtype):
    x: torch.Tensor = cases.build(case, dtype, generator(6, device))["gate_up_NF2"]
    grad = torch.randn(len(x), x.shape[1] // 2, generator=generator(7)).to(device, dtype)
    found = on_kernel(x, grad)
    assert found.dtype == dtype
    expected = gradient._backward(x.double().cpu(), grad.double().cpu())
    assert_near(found.cpu(), expected, 3e-6 if dtype == torch.float32 else 5e-3, "gate_up")
    for block in (16, 64):
        assert_same_bits(on_kernel(x, grad, block), found, f"blocks of {block}")
    assert_same_bits(on_kernel(x[1:2], grad[1:2]), found[1:2], "a row alone")


@in_interpreter
def test_kernel_of_more_dims_strides_and_no_rows():
    x, grad = torch.randn(2, 3, 10, generator=generator(8)), torch.ones(()).expand(2, 3, 5)
    flat = on_kernel(x.flatten(0, 1), grad.reshape(6, 5).contiguous())
    assert_same_bits(on_kernel(x, grad).flatten(0, 1), flat)
    turned = grad[0].T.contiguous().T
    assert_same_bits(on_kernel(x[0].T.contiguous().T, turned), flat[:3])
    assert on_kernel(x[:0], grad[:0]).shape == (0, 3, 10)


@in_interpreter
def test_kernel_of_gates_far_out():
    x = torch.tensor([[-3e38, 2.0, -200.0, 3.0, 200.0, 4.0, 3e38, 5.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 4.0, 200.0, 5.0, 3e38]])
    assert_same_bits(on_kernel(x, torch.ones(1, 4)) + 0.0, expected)


@in_interpreter
def test_the_op_runs_the_kernel(monkeypatch: pytest.MonkeyPatch):
    x = cases.build("odd", torch.float32, generator(9))["gate_up_NF2"].requires_grad_()
    out = swiglu(x, out_dtype=torch.float32)
    grad = torch.randn(out.shape, generator=generator(10))
    expected = on_kernel(x.detach(), grad)
    monkeypatch.setattr(dispatch, "use_cpu", lambda *_: False)
    monkeypatch.setattr(dispatch, "use_reference", lambda _: False)
    out.backward(grad)
    assert_same_bits(grad_of(x), expected)


def test_kernel_refuses_fp64():
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"backward of swiglu with torch\.float64"):
        on_kernel(x, x[:, :2])


def test_threads_change_no_bit():
    x = torch.randn(900, 500, generator=generator(5))
    found = []
    for count in (1, 2):
        with threads(count):
            arguments: Arguments = {"gate_up_NF2": x, "out_dtype": torch.float32}
            found.append(backward(swiglu, arguments, NAMES)[1]["gate_up_NF2"])
    assert_same_bits(found[0], found[1])
