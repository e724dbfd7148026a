"""What every op's gradient.py is held to, given one call of the op: the shared checks.

`check_backward` runs the op with its own backward and, under dispatch.force("reference"), the
reference with autograd's, on the same inputs and the same gradient of the outputs.
"""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import dispatch
from tests.kernels.compare import (
    LOW,
    Arguments,
    assert_same_bits,
    changed,
    check_gradients,
    generator,
    leaves,
)

BOUND = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Norm of the difference from the reference's gradient, relative to that."""

Op = Callable[..., Tensor]


def backward_cases(shapes: Iterable[str]) -> list[Any]:
    """(device, case, dtype): small cases on the CPU, all on a GPU (where no kernel has fp64)."""
    names = list(shapes)
    small = [name for name in names if not name.startswith(("inkling", "router"))]
    return [pytest.param("cpu", name, dtype) for name in small for dtype in BOUND] + [
        pytest.param("cuda", name, dtype, marks=pytest.mark.gpu) for name in names for dtype in LOW
    ]


def backward(
    op: Op,
    arguments: Arguments,
    names: Iterable[str],
    *,
    layout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a fixed random projection of it with respect to `names`.

    Gradients are gathered in fp32 at least, as the trainer does for weights; `layout` gives the
    gradient of the output other strides.
    """
    names = list(names)
    given = leaves(arguments, names)
    for name in names:
        if given[name].dtype != torch.float64:
            given[name].grad_dtype = torch.float32
    out = op(**given)
    grad = torch.randn(out.shape, generator=generator(99)).bfloat16().to(out.device, out.dtype)
    out.backward(grad if layout is None else layout(grad))
    return out.detach(), {name: grad_of(given[name]) for name in names}


def check_backward(
    op: Op, arguments: Arguments, names: Iterable[str], bounds: dict[torch.dtype, float] = BOUND
) -> None:
    """Equal output bits with and without gradient; gradients near those of the forced reference,
    in equal bits run by run, under checkpointing and for each subset of `names`; and near those
    without compiled loops, and of inputs with other strides."""
    names = list(names)
    with torch.no_grad():
        plain = op(**arguments)
    out, found = backward(op, arguments, names)
    assert_same_bits(out, plain, "with a gradient")
    with dispatch.force("reference"):
        _, expected = backward(op, arguments, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "has_loops", lambda: False)
        _, without_loops = backward(op, arguments, names)
    again = backward(lambda **kw: checkpoint(op, use_reentrant=False, **kw), arguments, names)[1]
    strided = {name: _strided(arguments[name]) for name in names}
    other = backward(op, changed(arguments, **strided), names, layout=_strided)[1]
    for name in names:
        bound = bounds[arguments[name].dtype]
        assert_near(found[name], expected[name], bound, name)
        assert_near(without_loops[name], found[name], bound, f"{name}, without loops")
        assert_near(other[name], found[name], bound, f"{name}, strided")
        assert_same_bits(again[name], found[name], f"{name}, checkpointed")
    if out.is_cuda:
        _check_no_waiting(op, arguments, names)
    for few in (subset for n in range(1, len(names) + 1) for subset in combinations(names, n)):
        for name, grad in backward(op, arguments, few)[1].items():
            assert_same_bits(grad, found[name], f"{name} of {few}")


def _check_no_waiting(op: Op, arguments: Arguments, names: Iterable[str]) -> None:
    given = leaves(arguments, names)
    grad = torch.ones_like(op(**given))
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(**given).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def grad_of(x: Tensor) -> Tensor:
    """Its gradient, which it must have."""
    assert x.grad is not None
    return x.grad


def check_no_rows(op: Op, arguments: Arguments, names: Iterable[str]) -> None:
    """Of no rows: gradients of rows are empty, those of weights zero."""
    out, found = backward(op, arguments, names)
    assert out.shape[0] == 0
    for name, grad in found.items():
        assert grad.shape == arguments[name].shape
        assert not grad.any()


def assert_near(found: Tensor, expected: Tensor, bound: float, what: str) -> None:
    """Norm of the difference at most `bound` times that of `expected`."""
    assert found.shape == expected.shape, what
    assert found.isfinite().all(), what
    size = float(expected.double().norm())
    error = float((found.double() - expected.double()).norm())
    assert error <= bound * size, (what, error, size)


def check_finite_differences(op: Op, arguments: Arguments, names: Iterable[str]) -> None:
    """torch.autograd.gradcheck in fp64, of the op's own backward."""
    assert not dispatch.is_forced()
    check_gradients(op, arguments, names)


def _strided(x: Tensor) -> Tensor:
    """The same values, every second place along the last dim."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]
