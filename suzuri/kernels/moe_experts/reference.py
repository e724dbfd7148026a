"""The parts, one after the other."""

from typing import Any, NamedTuple

from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation, copy_rows, moe_permute, sort_slots
from suzuri.kernels.swiglu import swiglu

GATHERED = 96
"""Slots up to which their rows are read where the tokens are: less than this is sorted at once."""


class Kept(NamedTuple):
    """What a gradient asks for again: the sorted slots, and gate and up of each [M, 2F] in at least
    fp32."""

    order: Permutation
    gate_up_MF2: Tensor


def moe_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    num_rows_1: Tensor | None = None,
    order: Permutation | None = None,
) -> Tensor:
    given = (x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF, num_rows_1)
    y_MD, order = slot_outputs(*given, order)
    return moe_combine(y_MD, order, weights_NJ, out_dtype=x_ND.dtype)


def slot_outputs(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    num_rows_1: Tensor | None = None,
    order: Permutation | None = None,
) -> tuple[Tensor, Permutation]:
    """The sorted outputs of all slots [M, D], not weighted. Gate and up of a slot never leave the
    product's kernel."""
    dtype, num_slots = x_ND.dtype, weights_NJ.shape[1]
    slots: dict[str, Any] = {
        "num_experts": gate_up_EFD.shape[0],
        "num_slots": num_slots,
        "num_rows_1": num_rows_1,
    }
    out: dict[str, Any] = {"out_dtype": dtype, "num_shared": num_slots - experts_NK.shape[1]}
    hidden: dict[str, Any] = out | {"swiglu": True}
    if weights_NJ.numel() <= GATHERED and not exact.records_gradient(x_ND):
        order = order or sort_slots(x_ND, experts_NK, **slots)
        rows, hidden = x_ND, hidden | {"order_M": order.order_M, "num_slots": num_slots}
    elif order is not None and not exact.records_gradient(x_ND):
        rows = copy_rows(x_ND, order)
    else:
        rows, order = moe_permute(x_ND, experts_NK, **slots)
    hidden_MF = grouped_gemm(rows, gate_up_EFD, order.offsets_E1, **hidden)
    del rows  # the largest of a step, and as large as what comes now
    return grouped_gemm(hidden_MF, down_EDF, order.offsets_E1, **out), order


def with_parts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
) -> tuple[Tensor, Kept]:
    """`moe_experts` part by part, and what its gradient wants to have."""
    dtype, wide = x_ND.dtype, exact.at_least_fp32(x_ND.dtype)
    num_experts, num_slots = gate_up_EFD.shape[0], weights_NJ.shape[1]
    rows_MD, order = moe_permute(x_ND, experts_NK, num_experts=num_experts, num_slots=num_slots)
    gate_up_MF2 = grouped_gemm(rows_MD, gate_up_EFD, order.offsets_E1, out_dtype=wide)
    hidden_MF = swiglu(gate_up_MF2, out_dtype=dtype)
    y_MD = grouped_gemm(hidden_MF, down_EDF, order.offsets_E1, out_dtype=dtype)
    return moe_combine(y_MD, order, weights_NJ, out_dtype=dtype), Kept(order, gate_up_MF2)
