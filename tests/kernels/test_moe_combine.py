"""moe_combine against loops over tokens and slots, and as the inverse of moe_permute."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.moe_combine import cases, moe_combine
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.moe_permute import cases as permute_cases
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
)


def build(case: str, dtype: torch.dtype, device: str = "cpu", out: torch.dtype | None = None):
    """Arguments of a case with its permutation made of the drawn order."""
    drawn: Arguments = cases.build(case, dtype, generator(1, device))
    order_M = drawn.pop("order_M")
    permutation = Permutation(order_M, order_M.argsort(), torch.zeros(0, dtype=torch.int64))
    return drawn | {"permutation": permutation, "out_dtype": out or dtype}


def plain(y_MD: Tensor, permutation: Permutation, weights_NJ: Tensor) -> Tensor:
    out_ND = y_MD.new_zeros(len(weights_NJ), y_MD.shape[1])
    for row, flat in enumerate(permutation.order_M.tolist()):
        token, slot = divmod(flat, weights_NJ.shape[1])
        out_ND[token] += weights_NJ[token, slot] * y_MD[row]
    return out_ND


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_weighted_sum(device: str, case: str, dtype: torch.dtype):
    arguments = build(case, dtype, device)
    out_ND = moe_combine(**arguments)
    assert out_ND.dtype == dtype
    y, weights = arguments["y_MD"].double(), arguments["weights_NJ"].double()
    permutation = arguments["permutation"]
    size = plain(y.abs(), permutation, weights)
    noise = FP64_NOISE if dtype == torch.float64 else (weights.shape[1] + 1) * FP32_EPS
    assert_close(out_ND, plain(y, permutation, weights), magnitude=size, noise=noise)


@each_low_dtype
def test_slots_are_added_in_order_in_fp32(device: str, dtype: torch.dtype):
    arguments = build("tiny", dtype, device, out=torch.float32)
    weights_NJ, inverse_M = arguments["weights_NJ"], arguments["permutation"].inverse_M
    slots_NJD = arguments["y_MD"][inverse_M].unflatten(0, weights_NJ.shape).float()
    terms_JND = (weights_NJ[..., None] * slots_NJD).unbind(1)
    forwards, backwards = terms_JND[0], terms_JND[-1]
    for term in terms_JND[1:]:
        forwards = forwards + term
    for term in reversed(terms_JND[:-1]):
        backwards = backwards + term
    assert not torch.equal(forwards, backwards)
    assert_same_bits(moe_combine(**arguments), forwards)


@each_low_dtype
@pytest.mark.parametrize("slot", range(4))
def test_undoes_the_permutation(device: str, slot: int, dtype: torch.dtype):
    """With all the weight on one slot, each token's own row comes back, whatever the experts."""
    arguments: Arguments = permute_cases.build("tiny", dtype, generator(2, device))
    rows_MD, permutation = moe_permute(**arguments)
    weights_NJ = torch.zeros(9, 4, device=device)
    weights_NJ[:, slot] = 1.0
    back = moe_combine(rows_MD, permutation, weights_NJ, out_dtype=dtype)
    assert_same_bits(back, arguments["x_ND"])


def test_weights_in_low_precision_are_widened():
    arguments = build("tiny", torch.bfloat16)
    low = arguments["weights_NJ"].bfloat16()
    found = moe_combine(**changed(arguments, weights_NJ=low))
    assert_same_bits(found, moe_combine(**changed(arguments, weights_NJ=low.float())))
    with dispatch.force("reference"):
        assert_same_bits(moe_combine(**changed(arguments, weights_NJ=low)), found)


def test_gradients_are_those_of_finite_differences():
    arguments = build("one_slot", torch.float64) | {"y_MD": torch.eye(4, dtype=torch.float64)}
    check_gradients(moe_combine, arguments, ["y_MD", "weights_NJ"])
    arguments = build("odd", torch.float64)
    arguments["y_MD"] = arguments["y_MD"][:, :2]
    check_gradients(moe_combine, arguments, ["y_MD", "weights_NJ"])


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments = build("tiny", dtype, device)
    check_low_precision_gradients(moe_combine, arguments, ["y_MD", "weights_NJ"])


def test_a_wrong_number_of_slots_is_refused():
    arguments = build("odd", torch.float32)
    with pytest.raises(ValueError, match="15 rows for"):
        moe_combine(**changed(arguments, weights_NJ=torch.ones(5, 4)))
