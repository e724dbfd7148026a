"""router with experts that are given: R09, weights and gradients from the logits as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.router import cases, router
from tests.kernels.backward import backward_cases, check_backward, check_finite_differences
from tests.kernels.compare import (
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    threads,
)
from tests.kernels.on_triton import kernel_cases, nan_filled

SMALL = ("tiny", "odd", "all_chosen")
TRAINED = ["x_ND", "weight_ED", "global_scale_1"]


def arguments_of(case: str, dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return cases.build(case, dtype, generator(1, device))


def other_choices(arguments: Arguments) -> Tensor:
    """For each row experts that the router would not all choose, drawn at random."""
    rows, routed = arguments["x_ND"].shape[0], arguments["bias_R"].shape[0]
    k = arguments["num_experts_per_token"]
    drawn = torch.rand(rows, routed, generator=generator(2)).argsort(1)[:, :k]
    return drawn.sort(1).values.to(arguments["x_ND"].device)


def weights(**arguments: Any) -> Tensor:
    return router(**arguments)[1]


def assert_weighs_given(arguments: Arguments, run: Callable[..., Any]) -> None:
    """Experts as given; weights those of the formula in fp64, from the op's own logits."""
    given_NK = other_choices(arguments)
    own = run(**arguments)
    experts_NK, weights_NJ, logits_NE = run(**changed(arguments, given_NK=given_NK))
    assert_same_bits(experts_NK, given_NK)
    assert_same_bits(logits_NE, own[2])
    routed = arguments["bias_R"].shape[0]
    logits = logits_NE.double()
    share = torch.sigmoid(torch.cat([logits.gather(1, given_NK), logits[:, routed:]], 1))
    scale = arguments["route_scale"] * arguments["global_scale_1"].double()
    expected = share / share.sum(1, keepdim=True) * scale
    assert_close(weights_NJ, expected, ulps=8, noise=2.0**-20)
    if arguments["num_experts_per_token"] < routed:
        assert (experts_NK != own[0]).any()


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_given_experts_are_taken_and_weighed_as_they_are(
    device: str, case: str, dtype: torch.dtype
):
    """R09: the weights are read from the whole logits, not from what a choice left of them."""
    assert_weighs_given(arguments_of(case, dtype, device), router)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_the_own_choice_given_changes_no_bit(device: str, case: str, dtype: torch.dtype):
    arguments = arguments_of(case, dtype, device)
    own = router(**arguments)
    again = router(**changed(arguments, given_NK=own[0]))
    for found, expected in zip(again, own, strict=True):
        assert_same_bits(found, expected)
    if dtype != torch.float64:
        replayed = gradients(weights, changed(arguments, given_NK=own[0]), TRAINED)
        for found, expected in zip(replayed, gradients(weights, arguments, TRAINED), strict=True):
            assert_same_bits(found, expected)


@each_low_dtype
@pytest.mark.parametrize("case", SMALL)
def test_rows_without_any_choose_and_compiled_loops_agree(case: str, dtype: torch.dtype):
    arguments = arguments_of(case, dtype)
    given_NK, own_NK = other_choices(arguments), router(**arguments)[0]
    given_NK[::2] = -1
    found = router(**changed(arguments, given_NK=given_NK))
    assert_same_bits(found[0][::2], own_NK[::2])
    assert_same_bits(found[0][1::2], given_NK[1::2])
    with dispatch.force("reference"):
        expected = router(**changed(arguments, given_NK=given_NK))
    for num_threads in (1, 2):
        with threads(num_threads):
            again = router(**changed(arguments, given_NK=given_NK.T.contiguous().T))
        for one, other in zip(again, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_backward(device: str, case: str, dtype: torch.dtype):
    arguments = arguments_of(case, dtype, device)
    check_backward(weights, changed(arguments, given_NK=other_choices(arguments)), TRAINED)


def test_the_gradient_is_that_of_finite_differences_and_not_zero():
    """R09: of experts that the router itself would not choose."""
    arguments = arguments_of("tiny", torch.float64)
    arguments = changed(arguments, x_ND=arguments["x_ND"][:3, :5])
    arguments = changed(arguments, weight_ED=arguments["weight_ED"][:, :5].contiguous() * 4)
    own_NK = router(**arguments)[0]
    left = [[e for e in range(8) if e not in own][:2] for own in own_NK.tolist()]
    arguments = changed(arguments, given_NK=torch.tensor(left))
    check_finite_differences(weights, arguments, TRAINED)
    of_weight = gradients(weights, arguments, ["weight_ED"])[0]
    for row in set(torch.tensor(left).flatten().tolist()) | {8, 9}:
        assert of_weight[row].abs().sum() > 1e-3


def test_what_is_no_choice_is_refused():
    arguments = arguments_of("tiny", torch.float32)
    for given_NK in (
        torch.zeros(9, 2, dtype=torch.int32),
        torch.zeros(9, 3, dtype=torch.int64),
        torch.zeros(8, 2, dtype=torch.int64),
    ):
        with pytest.raises(ValueError, match="router: given is"):
            router(**changed(arguments, given_NK=given_NK))
    with pytest.raises(IndexError):
        router(**changed(arguments, given_NK=torch.tensor([[0, 8]] * 9)))


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_the_kernel(device: str, case: str, dtype: torch.dtype):
    pytest.importorskip("triton")
    from suzuri.kernels.router import kernel

    arguments = arguments_of(case, dtype, device)
    with nan_filled():
        assert_weighs_given(arguments, kernel.router)
        own = kernel.router(**arguments)
        given_NK = other_choices(arguments)
        given_NK[::2] = -1
        mixed = kernel.router(**changed(arguments, given_NK=given_NK))
        assert_same_bits(mixed[0][1::2], given_NK[1::2])
        for found, expected in zip(mixed, own, strict=True):
            assert_same_bits(found[::2], expected[::2])
        again = kernel.router(**changed(arguments, given_NK=own[0]))
        for found, expected in zip(again, own, strict=True):
            assert_same_bits(found, expected)
