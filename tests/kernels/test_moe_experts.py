"""moe_experts against plain fp64 sums, and bit for bit the composition of its parts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_experts import cases, expert_outputs, moe_experts
from tests.kernels.compare import (
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    check_gradients,
    each_dtype,
    each_low_dtype,
    generator,
    threads,
)

SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]


def arguments_of(case: str, dtype: torch.dtype) -> Arguments:
    return cases.build(case, dtype, generator(1))


@pytest.mark.parametrize("case", SMALL)
def test_the_weighted_sum_of_all_chosen_and_shared_experts(case: str):
    given = arguments_of(case, torch.float32)
    found = moe_experts(**given)
    gate_up, down = given["gate_up_EFD"].double(), given["down_EDF"].double()
    num_experts, num_slots = len(gate_up), given["weights_NJ"].shape[1]
    expected = torch.zeros_like(found, dtype=torch.float64)
    for n, x in enumerate(given["x_ND"].double()):
        ids = given["experts_NK"][n].tolist()
        ids += range(num_experts - num_slots + len(ids), num_experts)
        for weight, e in zip(given["weights_NJ"][n].double(), ids, strict=True):
            gate, up = (gate_up[e] @ x)[0::2], (gate_up[e] @ x)[1::2]
            expected[n] += weight * (down[e] @ (torch.nn.functional.silu(gate) * up))
    size = torch.full_like(expected, float(expected.abs().max()))
    assert_close(found, expected, noise=2.0**-19, magnitude=size)


@each_low_dtype
@pytest.mark.parametrize("held", [True, False], ids=["parameters", "tensors"])
@pytest.mark.parametrize("case", SMALL)
def test_the_loop_is_the_composition(case: str, held: bool, dtype: torch.dtype):
    given = arguments_of(case, dtype)
    if held:
        for name in ("gate_up_EFD", "down_EDF"):
            given[name] = torch.nn.Parameter(given[name], requires_grad=False)
    with dispatch.force("reference"):
        expected = moe_experts(**given)
    for num_threads in (1, 2):
        with threads(num_threads):
            assert_same_bits(moe_experts(**given), expected)
    rows = {name: given[name][2:4] for name in ("x_ND", "experts_NK", "weights_NJ")}
    assert_same_bits(moe_experts(**changed(given, **rows)), expected[2:4])


@each_low_dtype
@pytest.mark.parametrize("case", SMALL)
def test_outputs_that_are_combined_are_the_whole(case: str, dtype: torch.dtype):
    given = arguments_of(case, dtype)
    found = expert_outputs(**given)
    slots = given["weights_NJ"].numel()
    assert found.y_MD.shape == (slots, given["x_ND"].shape[1])
    assert found.inverse_M.shape == (slots,)
    combined = moe_combine(found.y_MD, found.permutation, found.weights_NJ, out_dtype=dtype)
    assert_same_bits(combined, moe_experts(**given))


def test_much_work_goes_to_all_threads_with_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    from suzuri.kernels.moe_experts import cpu

    given = arguments_of("tiny", torch.bfloat16)
    expected = moe_experts(**given)
    monkeypatch.setattr(cpu, "SMALL_PRODUCT", 0)
    assert_same_bits(moe_experts(**given), expected)


@each_dtype
def test_every_token_may_want_the_same_expert(dtype: torch.dtype):
    given = arguments_of("tiny", dtype)
    given["experts_NK"] = torch.tensor([[3, 5]]).expand(9, 2)
    with dispatch.force("reference"):
        expected = moe_experts(**given)
    assert_same_bits(moe_experts(**given), expected)


def test_gradients():
    given = arguments_of("odd", torch.float64)

    def run(**arguments: Any) -> Tensor:
        return moe_experts(**arguments)

    check_gradients(run, given, ["x_ND", "weights_NJ", "gate_up_EFD", "down_EDF"])


def test_shapes_that_do_not_fit_are_refused():
    given = arguments_of("tiny", torch.float32)
    with pytest.raises(ValueError, match="moe_experts: x"):
        moe_experts(**changed(given, down_EDF=given["down_EDF"][:, :, :5]))
    with pytest.raises(ValueError, match="moe_experts: ids"):
        moe_experts(**changed(given, weights_NJ=given["weights_NJ"][:, :1]))
    for op in (moe_experts, expert_outputs):
        with pytest.raises(ValueError, match="one dtype"):
            op(**changed(given, x_ND=given["x_ND"].bfloat16()))
