"""How results are compared: bit for bit, or against an independent fp64 value in units in the last
place, so that a second rounding anywhere in an op fails its test.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

LOW = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
each_low_dtype = pytest.mark.parametrize("dtype", LOW, ids=str)
FP64_NOISE = 2.0**-44
"""Relative to the largest terms: what two fp64 evaluations may differ by."""
FP32_EPS = 2.0**-24
ONE_ROUNDING = 0.501
"""Ulps of one rounding to nearest, with room for fp32 arithmetic before a rounding to bf16."""
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

Arguments = dict[str, Any]


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def device_cases(shapes: Iterable[str]) -> list[Any]:
    """(device, case) parameters, the device indirect: preset sizes run on a GPU only."""
    names = list(shapes)
    small = [name for name in names if not name.startswith("inkling")]
    return [pytest.param("cpu", name) for name in small] + [
        pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names
    ]


def bits(x: Tensor) -> Tensor:
    """The bit pattern of floating values as integers; other tensors as they are."""
    return x.contiguous().view(_BITS[x.element_size()]) if x.is_floating_point() else x


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    differs = bits(actual) != bits(expected)
    if differs.any():
        where = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} values differ in bits, first at "
            f"{where}: {actual[where].item()!r} against {expected[where].item()!r}"
        )


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbouring values of `dtype` around each fp64 value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(exact, info.eps), exponent)


def assert_close(
    actual: Tensor,
    exact: Tensor,
    *,
    ulps: float = ONE_ROUNDING,
    noise: float = FP64_NOISE,
    magnitude: Tensor | None = None,
) -> None:
    """|actual - exact| <= ulps of the dtype of `actual` + noise * magnitude.

    `exact` is fp64; `magnitude` is the size of the terms it was summed from (default: its own).
    Infinities must agree; NaN never does.
    """
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    size = exact.abs() if magnitude is None else magnitude
    size = torch.where(size.isinf(), 0.0, size)
    error = torch.where(actual == exact, 0.0, (actual.double() - exact).abs())
    excess = error - ulps * ulp(exact, actual.dtype) - noise * size
    bad = ~(excess <= 0)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} values are off, first at {where}: "
            f"{actual[where].item()!r} against {exact[where].item()!r}"
        )


def changed(arguments: Arguments, **changes: Any) -> Arguments:
    """The arguments with some replaced or added."""
    return arguments | changes


def widened(arguments: Arguments) -> Arguments:
    """The same arguments with every floating tensor in fp64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def leaves(arguments: Arguments, names: Iterable[str]) -> Arguments:
    """The arguments with fresh leaves that require gradients under `names`."""
    fresh = {name: arguments[name].detach().clone().requires_grad_() for name in names}
    return arguments | fresh


def gradients(
    op: Callable[..., Tensor], arguments: Arguments, names: Iterable[str]
) -> list[Tensor]:
    """Gradients of a fixed random projection of the output with respect to `names`."""
    names = list(names)
    arguments = leaves(arguments, names)
    out = op(**arguments)
    weight = torch.randn(out.shape, generator=generator(99)).bfloat16()  # the same in every dtype
    out.backward(weight.to(out.device, out.dtype))
    found = [arguments[name].grad for name in names]
    assert all(grad is not None for grad in found)
    return found


def check_gradients(op: Callable[..., Any], arguments: Arguments, names: Iterable[str]) -> None:
    """torch.autograd.gradcheck of `op` in fp64, over the arguments in `names` together."""
    names = list(names)
    arguments = leaves(arguments, names)

    def of_leaves(*tensors: Tensor) -> Any:
        return op(**(arguments | dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(of_leaves, [arguments[name] for name in names])


def check_low_precision_gradients(
    op: Callable[..., Tensor], arguments: Arguments, names: Iterable[str]
) -> None:
    """Gradients come in the dtype of their tensors and agree with those of the fp64 evaluation.

    The bound is on the norm: 1e-5 for fp32, 2e-2 for bf16 (rounded outputs and gradients).
    """
    names = list(names)
    found = gradients(op, arguments, names)
    exact = gradients(op, widened(arguments), names)
    for name, grad, exact_grad in zip(names, found, exact, strict=True):
        dtype = arguments[name].dtype
        assert grad.dtype == dtype, name
        assert grad.isfinite().all(), name
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        error = (grad.double() - exact_grad).norm() / exact_grad.norm()
        assert error < bound, (name, float(error))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the block with `count` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
