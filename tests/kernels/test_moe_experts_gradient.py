"""The experts' own backward, by the compiled loop, by torch and by a GPU's kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.exact import at_least_fp32
from suzuri.kernels.moe_experts import cases, gradient, moe_experts
from tests.kernels.backward import (
    assert_near,
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
)
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    each_low_dtype,
    generator,
    leaves,
    threads,
)
from tests.kernels.on_triton import in_interpreter, nan_filled, on_gpu
from tests.kernels.triton_interpreter import patch_loop_bounds

TRAINED = ["x_ND", "weights_NJ", "gate_up_EFD", "down_EDF"]
PER_TOKEN = ["x_ND", "experts_NK", "weights_NJ"]
REPEATED = torch.tensor([[1, 4]]).expand(9, 2)


def with_weights_of_one_dtype(weights_NJ: Tensor, **rest: Any) -> Tensor:
    """The gradient of a weight is that of unrounded slot outputs: in bf16 near the reference's, and
    held to the bound of bf16."""
    return moe_experts(weights_NJ=weights_NJ.to(at_least_fp32(weights_NJ.dtype)), **rest)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    arguments["weights_NJ"] = arguments["weights_NJ"].to(dtype)
    check_backward(with_weights_of_one_dtype, arguments, TRAINED)


@each_low_dtype
def test_by_torch_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """What a CPU without numba runs between the products."""
    arguments: Arguments = cases.build("tiny", dtype, generator(2))
    expected = backward(moe_experts, arguments, TRAINED)[1]
    monkeypatch.setattr(dispatch, "has_loops", lambda: False)
    found = backward(moe_experts, arguments, TRAINED)[1]
    for name in TRAINED:
        assert_near(found[name], expected[name], 1e-6 if dtype == torch.float32 else 2e-3, name)


@each_low_dtype
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_the_middle_by_loop_and_by_torch(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
):
    g = generator(3)
    gate_up, grad = 6 * torch.randn(rows, 26, generator=g), torch.randn(rows, 13, generator=g)
    weights = torch.rand(rows, generator=g)
    found = gradient.middle(gate_up.clone(), grad.clone(), weights, dtype)
    monkeypatch.setattr(dispatch, "has_loops", lambda: False)
    expected = gradient.middle(gate_up.clone(), grad.clone(), weights, dtype)
    for name, a, b in zip(("weights", "hidden", "gate and up"), found, expected, strict=True):
        # A hidden unit just between two bf16 numbers may go either way.
        assert_near(a, b, 1e-6 if dtype == torch.float32 else 1e-3, name)


def test_extreme_gates_have_finite_gradients(monkeypatch: pytest.MonkeyPatch):
    gates = torch.tensor([[-3e4, -200.0, -88.8, 0.0, 88.8, 3e4]])
    gate_up = torch.stack([gates, torch.full_like(gates, 2.0)], -1).flatten(1)
    expected = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0, 2.0]])  # d silu(g) * up
    for has_loops in (True, False):
        monkeypatch.setattr(dispatch, "has_loops", lambda has_loops=has_loops: has_loops)
        given = (gate_up.clone(), torch.ones(1, 6), torch.ones(1))
        _, _, found = gradient.middle(*given, torch.float32)
        assert torch.allclose(found[:, 0::2], expected, atol=1e-30)


MIDDLES = [
    pytest.param("cpu", torch.float32, marks=in_interpreter),
    pytest.param("cuda", torch.float32, marks=on_gpu),
    pytest.param("cuda", torch.bfloat16, marks=on_gpu),
]


@pytest.mark.parametrize(("device", "dtype"), MIDDLES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 13), (1, 13), (37, 128), (19, 300), (300, 1)])
def test_the_middle_by_kernel(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, rows: int, hidden: int
):
    """Near fp64; in equal bits with other warps and for rows alone."""
    pytest.importorskip("triton")
    from suzuri.kernels.swiglu import kernel

    patch_loop_bounds(monkeypatch)
    g = generator(10)
    gate_up = 6 * torch.randn(rows, 2 * hidden, generator=g)
    grad, weights = torch.randn(rows, hidden, generator=g), torch.rand(rows, generator=g)
    given = (gate_up.to(device), grad.to(device), weights.to(device))
    with nan_filled():
        found = kernel.slots_backward(*given, dtype)
    low = dtype == torch.bfloat16
    expected = gradient.middle(gate_up.double(), grad.double(), weights.double(), dtype)
    for name, a, b in zip(("weights", "hidden", "gate and up"), found, expected, strict=True):
        assert a.dtype == (dtype if name == "gate and up" else torch.float32)
        assert_near(a.cpu(), b, 5e-3 if low else 3e-6, name)
    for n in {0, rows // 2, rows - 1} if rows else ():
        gate_up, grad, weights = (t[n : n + 1] for t in given)
        alone = kernel.slots_backward(gate_up, grad, weights, dtype, num_warps=2)
        for name, a, b in zip(("weights", "hidden", "gate and up"), alone, found, strict=True):
            assert_same_bits(a, b[n : n + 1], f"{name}, row {n}")


@in_interpreter
def test_the_op_runs_the_kernel_of_the_middle(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    patch_loop_bounds(monkeypatch)
    g = generator(11)
    gate_up, grad = torch.randn(5, 26, generator=g), torch.randn(5, 13, generator=g)
    weights = torch.rand(5, generator=g)
    expected = gradient.middle(gate_up.clone(), grad.clone(), weights, torch.float32)
    monkeypatch.setattr(dispatch, "use_cpu", lambda *_: False)
    monkeypatch.setattr(dispatch, "use_reference", lambda _: False)
    found = gradient.middle(gate_up, grad, weights, torch.bfloat16)
    assert found[2].dtype == torch.bfloat16  # only the kernel rounds
    assert_near(found[2], expected[2], 1e-2, "gate and up")


@in_interpreter
def test_the_middle_by_kernel_with_extreme_gates(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from suzuri.kernels.swiglu import kernel

    patch_loop_bounds(monkeypatch)
    gates = torch.tensor([[-3e38, -200.0, -88.8, 0.0, 88.8, 3e38]])
    gate_up = torch.stack([gates, torch.full_like(gates, 0.5)], -1).flatten(1)
    _, _, found = kernel.slots_backward(gate_up, torch.ones(1, 6), torch.ones(1), torch.float32)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.25, 0.5, 0.5]])  # d silu(g) * up
    assert torch.allclose(found[:, 0::2], expected, atol=1e-30)


def test_finite_differences():
    arguments: Arguments = cases.build("none_shared", torch.float64, generator(4))
    arguments |= {"x_ND": arguments["x_ND"][:3, :5], "weights_NJ": arguments["weights_NJ"][:3]}
    arguments |= {"experts_NK": arguments["experts_NK"][:3]}
    arguments |= {"gate_up_EFD": arguments["gate_up_EFD"][:, :6, :5]}
    arguments |= {"down_EDF": arguments["down_EDF"][:, :5, :3]}
    check_finite_differences(moe_experts, arguments, TRAINED)


def test_an_expert_without_rows_has_zeros_and_one_with_all_of_them_the_sum():
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(5))
    arguments["experts_NK"] = REPEATED
    low = changed(arguments, weights_NJ=arguments["weights_NJ"].bfloat16())
    check_backward(with_weights_of_one_dtype, low, TRAINED)
    found = backward(moe_experts, arguments, TRAINED)[1]
    for name in TRAINED[2:]:
        grad = found[name]
        assert grad.dtype == torch.float32
        idle = [e for e in range(10) if e not in (1, 4, 8, 9)]
        assert not grad[idle].any()
        assert grad[[1, 4, 8, 9]].flatten(1).any(1).all()


def test_gradients_of_a_token_do_not_depend_on_the_others():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(6))
    grad = torch.randn(9, 64, generator=generator(7))
    among = leaves(arguments, TRAINED)
    moe_experts(**among).backward(grad)
    alone = changed(arguments, **{name: arguments[name][3:5] for name in PER_TOKEN})
    alone = leaves(alone, TRAINED)
    moe_experts(**alone).backward(grad[3:5])
    for name in ("x_ND", "weights_NJ"):
        assert_near(alone[name].grad, among[name].grad[3:5], 1e-6, name)
    # The gradient of a weight is the sum over the tokens: those alone and those left out.
    rest = [n for n in range(9) if n not in (3, 4)]
    left_out = changed(arguments, **{name: arguments[name][rest] for name in PER_TOKEN})
    left_out = leaves(left_out, TRAINED)
    moe_experts(**left_out).backward(grad[rest])
    for name in TRAINED[2:]:
        total = alone[name].grad + left_out[name].grad
        assert_near(total, among[name].grad, 1e-6, name)


@each_low_dtype
def test_gradients_repeat_bit_for_bit_on_two_threads(dtype: torch.dtype):
    g = generator(8)
    arguments: Arguments = {
        "x_ND": torch.randn(500, 64, generator=g).to(dtype),
        "experts_NK": torch.rand(500, 30, generator=g).argsort(1)[:, :3].sort(1).values,
        "weights_NJ": torch.rand(500, 4, generator=g),
        "gate_up_EFD": torch.randn(31, 66, 64, generator=g).to(dtype),
        "down_EDF": torch.randn(31, 64, 33, generator=g).to(dtype),
    }
    with threads(2):
        first = backward(moe_experts, arguments, TRAINED)[1]
        for _ in range(2):
            for name, grad in backward(moe_experts, arguments, TRAINED)[1].items():
                assert_same_bits(grad, first[name], name)


def test_no_rows():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(9))
    none = changed(arguments, **{name: arguments[name][:0] for name in PER_TOKEN})
    given = leaves(none, TRAINED)
    moe_experts(**given).sum().backward()
    for name in TRAINED:
        assert_same_bits(given[name].grad, torch.zeros_like(none[name]), name)


@each_low_dtype
def test_a_graph_that_is_walked_twice_gives_the_same_gradients(dtype: torch.dtype):
    """What the forward kept is not written over."""
    given = leaves(cases.build("tiny", dtype, generator(12)), TRAINED)
    out, inputs = moe_experts(**given), [given[name] for name in TRAINED]
    grad = torch.randn(out.shape, generator=generator(13)).to(dtype)
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    for name, a, b in zip(TRAINED, second, first, strict=True):
        assert_same_bits(a, b, name)
