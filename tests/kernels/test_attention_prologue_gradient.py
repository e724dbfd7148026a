"""The gradient of attention_prologue against the one of its reference: in loops (fp32 and bf16 on a
CPU), and through the gradients of its parts (fp64, and any GPU).
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import dispatch
from suzuri.kernels.attention_prologue import Scaling, attention_prologue, cases
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
from tests.kernels.test_attention_prologue import SCALINGS, many_rows

TRAINED = ["qkvr_NX", "conv_CK", "q_norm_C", "k_norm_C"]
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the norm; in bf16 the gradients themselves are rounded."""
SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]
each_scaling = pytest.mark.parametrize("scaling", SCALINGS, ids=str)
each_path = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "loops"])


def built(case: str, dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return cases.build(case, dtype, generator(1, device))


def run(**arguments: Any) -> Tensor:
    """Its four results as one."""
    fields = attention_prologue(**arguments)
    return torch.cat([x.flatten(1) for x in fields if x is not None], 1)


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for name, a, b in zip(TRAINED, found, expected, strict=True):
        assert a.shape == b.shape, name
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error < bound, (name, error)


def of_the_reference(arguments: Arguments) -> list[Tensor]:
    with dispatch.force("reference"):
        return gradients(run, widened(arguments), TRAINED)


@each_dtype
@each_scaling
@pytest.mark.parametrize("case", SMALL)
def test_against_the_reference(case: str, scaling: Scaling | None, dtype: torch.dtype):
    for given in (built(case, dtype), many_rows(built(case, dtype))):
        arguments = changed(given, scaling=scaling)
        found = gradients(run, arguments, TRAINED)
        assert [grad.dtype for grad in found] == [dtype] * 4
        assert_near(found, of_the_reference(arguments), BOUND[dtype])


@pytest.mark.gpu
@each_low_dtype
@each_scaling
@pytest.mark.parametrize("case", SMALL)
def test_on_a_gpu_against_the_reference(case: str, scaling: Scaling | None, dtype: torch.dtype):
    arguments = changed(built(case, dtype, "cuda"), scaling=scaling)
    found = gradients(run, arguments, TRAINED)
    assert_near(found, of_the_reference(arguments), BOUND[dtype])
    for name, a, b in zip(TRAINED, found, gradients(run, arguments, TRAINED), strict=True):
        assert_same_bits(a, b, name)


@each_scaling
def test_finite_differences(scaling: Scaling | None):
    check_gradients(run, changed(built("odd", torch.float64), scaling=scaling), TRAINED)


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_low_dtype
@each_scaling
@pytest.mark.parametrize("case", SMALL)
def test_the_forward_has_the_bits_of_one_without_a_gradient(
    device_type: str, case: str, scaling: Scaling | None, dtype: torch.dtype
):
    arguments = changed(built(case, dtype, device_type), scaling=scaling)
    out = run(**leaves(arguments, TRAINED))
    assert out.requires_grad
    assert_same_bits(out.detach(), run(**arguments))


@each_low_dtype
def test_equal_bits_from_run_to_run_on_any_number_of_threads(dtype: torch.dtype):
    given = many_rows(built("tiny", dtype), 2000)  # so many that threads share them out
    arguments = changed(given, scaling=Scaling(3.0, 0.1))
    expected = gradients(run, arguments, TRAINED)
    for count in (1, 2):
        with threads(count):
            found = gradients(run, arguments, TRAINED)
        for name, a, b in zip(TRAINED, found, expected, strict=True):
            assert_same_bits(a, b, f"{name}, {count} threads")


@each_path
def test_only_what_is_asked_for(dtype: torch.dtype):
    arguments = changed(built("odd", dtype), scaling=Scaling(2.0, 0.3))
    every = dict(zip(TRAINED, gradients(run, arguments, TRAINED), strict=True))
    for count in (1, 2, 3):
        for names in combinations(TRAINED, count):
            found = gradients(run, arguments, names)
            for name, grad in zip(names, found, strict=True):
                assert_same_bits(grad, every[name], name)


@each_path
@pytest.mark.parametrize("used", range(4))
def test_one_result_is_enough(used: int, dtype: torch.dtype):
    """What nobody looked at has no gradient, which is one of zeros."""

    def one(**arguments: Any) -> Tensor:
        field = attention_prologue(**arguments)[used]
        assert field is not None
        return field

    arguments = changed(built("tiny", dtype), scaling=Scaling(2.0, 0.3))
    found = gradients(one, arguments, ["qkvr_NX"])
    with dispatch.force("reference"):
        expected = gradients(one, widened(arguments), ["qkvr_NX"])
    assert float((found[0] - expected[0]).norm() / expected[0].norm()) < 1e-6


@each_path
def test_no_rows(dtype: torch.dtype):
    given = built("tiny", dtype)
    positions, seq_ids, starts = given["sequences"]
    none = (positions[:0], seq_ids[:0], torch.zeros_like(starts[:1]))
    arguments = leaves(changed(given, qkvr_NX=given["qkvr_NX"][:0], sequences=none), TRAINED)
    run(**arguments).sum().backward()
    for name in TRAINED:
        grad = arguments[name].grad
        assert grad is not None
        assert_same_bits(grad, torch.zeros_like(grad), name)


@each_path
def test_strided_inputs_and_gradients(dtype: torch.dtype):
    arguments = changed(built("tiny", dtype), scaling=Scaling(3.0, 0.1))
    expected = gradients(run, arguments, TRAINED)
    strided = {
        name: x.T.contiguous().T if x.dim() == 2 else x[:, None].expand(-1, 2)[:, 0]
        for name, x in ((name, arguments[name]) for name in TRAINED)
    }

    def turned(**given: Any) -> Tensor:
        return run(**given).T.contiguous().T

    for op in (run, turned):
        found = gradients(op, changed(arguments, **strided), TRAINED)
        for name, a, b in zip(TRAINED, found, expected, strict=True):
            assert_same_bits(a, b, name)


@each_path
def test_recomputed_in_a_checkpoint(dtype: torch.dtype):
    arguments = changed(built("odd", dtype), scaling=Scaling(3.0, 0.1))
    expected = gradients(run, arguments, TRAINED)

    def op(**given: Any) -> Tensor:
        return checkpoint(run, use_reentrant=False, **given)

    for name, a, b in zip(TRAINED, gradients(op, arguments, TRAINED), expected, strict=True):
        assert_same_bits(a, b, name)


def test_the_gradients_of_bf16_weights_can_be_had_in_fp32():
    arguments = leaves(many_rows(built("tiny", torch.bfloat16)), TRAINED)
    for name in TRAINED[1:]:
        arguments[name].grad_dtype = torch.float32
    out = run(**arguments)
    out.backward(torch.ones_like(out))
    for name in TRAINED[1:]:
        grad = arguments[name].grad
        assert grad is not None
        assert grad.dtype == torch.float32, name
        assert (grad.bfloat16() != grad).any(), name
