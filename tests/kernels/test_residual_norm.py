"""residual_norm is the composition of its parts, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation
from suzuri.kernels.residual_norm import cases, experts_residual_norm, residual_norm
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.short_conv import short_conv
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    check_gradients,
    device_cases,
    each_dtype,
    generator,
)


def parts(given: Arguments) -> tuple[Tensor, Tensor]:
    """Written out here once more, from the separate ops."""
    sequences = [given[name] for name in ("positions_N", "seq_ids_N", "seq_starts_S1")]
    memory = {name: given[name] for name in ("state_LRC", "slots_S") if name in given}
    y_ND = short_conv(given["y_ND"], given["conv_DK"], *sequences, **memory)
    h_ND = given["h_ND"] + y_ND
    return h_ND, rms_norm(h_ND, given["norm_D"], given["eps"])


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_without_state(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    for found, wanted in zip(residual_norm(**given), parts(given), strict=True):
        assert_same_bits(found, wanted)


@each_dtype
def test_with_state(dtype: torch.dtype):
    given = cases.build("tiny", dtype, generator(1))
    before = torch.randn(6, 5, 24, generator=generator(2)).to(dtype)
    later = changed(given, positions_N=given["positions_N"] + 2 * given["seq_ids_N"])
    slots = torch.tensor([4, 0, 2, 5])
    for build in (dispatch.force("reference"), None):
        states = [before.clone(), before.clone()]
        with_state = [changed(later, state_LRC=state, slots_S=slots) for state in states]
        if build is None:
            found = residual_norm(**with_state[0])
        else:
            with build:
                found = residual_norm(**with_state[0])
        for one, wanted in zip(
            (*found, states[0]), (*parts(with_state[1]), states[1]), strict=True
        ):
            assert_same_bits(one, wanted)


@each_dtype
def test_outputs_of_experts(dtype: torch.dtype):
    g, rows, width, slots_of = generator(5), 3, 24, 5
    y_MD = torch.randn(rows * slots_of, width, generator=g).to(dtype)
    order_M = torch.randperm(rows * slots_of, generator=g)
    permutation = Permutation(order_M, order_M.argsort(), torch.zeros(1, dtype=torch.int64))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights_NJ = torch.rand(rows, slots_of, generator=g).to(wide)
    given = {
        "h_ND": torch.randn(rows, width, generator=g).to(dtype),
        "conv_DK": torch.randn(width, 4, generator=g).to(dtype),
        "norm_D": torch.randn(width, generator=g).to(dtype),
        "positions_N": torch.tensor([0, 3, 9]),
        "seq_ids_N": torch.arange(3),
        "seq_starts_S1": torch.arange(4),
        "eps": 1e-6,
        "slots_S": torch.tensor([2, 0, 3]),
    }
    states = [torch.randn(4, 5, width, generator=generator(6)).to(dtype) for _ in range(2)]
    found = experts_residual_norm(y_MD, permutation, weights_NJ, **given, state_LRC=states[0])
    y_ND = moe_combine(y_MD, permutation, weights_NJ, out_dtype=dtype)
    expected = parts(changed(given, y_ND=y_ND, state_LRC=states[1]))
    for one, wanted in zip((*found, states[0]), (*expected, states[1]), strict=True):
        assert_same_bits(one, wanted)


@each_dtype
def test_n14_without_taps_the_input_is_added_once(dtype: torch.dtype):
    given = cases.build("tiny", dtype, generator(7))
    h_ND, _ = residual_norm(**changed(given, conv_DK=torch.zeros_like(given["conv_DK"])))
    assert_same_bits(h_ND, given["h_ND"] + given["y_ND"])


def test_gradients():
    given = cases.build("odd", torch.float64, generator(3))

    def run(**arguments: Any) -> Tensor:
        return torch.cat(residual_norm(**arguments), 1)

    check_gradients(run, given, ["y_ND", "h_ND", "conv_DK", "norm_D"])


def test_rows_that_do_not_fit_are_refused():
    given = cases.build("tiny", torch.float32, generator(4))
    for wrong in (given["h_ND"][:1], given["h_ND"].bfloat16()):
        with pytest.raises(ValueError, match="residual_norm: "):
            residual_norm(**changed(given, h_ND=wrong))
