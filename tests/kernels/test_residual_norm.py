"""residual_norm is the composition of its parts, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.residual_norm import cases, residual_norm
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
