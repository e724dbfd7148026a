"""The parts, one after the other."""

from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.swiglu import swiglu


def with_shared(experts_NK: Tensor, num_slots: int, num_experts: int) -> Tensor:
    """The chosen ids and those of the shared experts, which are the last ones: [N, num_slots]."""
    num_shared = num_slots - experts_NK.shape[1]
    shared_S = torch.arange(num_experts - num_shared, num_experts, device=experts_NK.device)
    return torch.cat([experts_NK, shared_S.expand(experts_NK.shape[0], -1)], 1)


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
) -> Tensor:
    y_MD, order = slot_outputs(x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
    return moe_combine(y_MD, order, weights_NJ, out_dtype=x_ND.dtype)


def slot_outputs(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
) -> tuple[Tensor, Permutation]:
    """The sorted outputs of all slots [M, D], not weighted. Gate and up of a slot never leave the
    product's kernel."""
    num_experts = gate_up_EFD.shape[0]
    experts_NJ = with_shared(experts_NK, weights_NJ.shape[1], num_experts)
    rows_MD, order = moe_permute(x_ND, experts_NJ, num_experts=num_experts)
    dtype, offsets_E1 = x_ND.dtype, order.offsets_E1
    hidden_MF = grouped_gemm(rows_MD, gate_up_EFD, offsets_E1, out_dtype=dtype, swiglu=True)
    return grouped_gemm(hidden_MF, down_EDF, offsets_E1, out_dtype=dtype), order


def with_parts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
) -> tuple[Tensor, Kept]:
    """`moe_experts` part by part, and what its gradient wants to have."""
    dtype, wide = x_ND.dtype, exact.at_least_fp32(x_ND.dtype)
    num_experts = gate_up_EFD.shape[0]
    experts_NJ = with_shared(experts_NK, weights_NJ.shape[1], num_experts)
    rows_MD, order = moe_permute(x_ND, experts_NJ, num_experts=num_experts)
    gate_up_MF2 = grouped_gemm(rows_MD, gate_up_EFD, order.offsets_E1, out_dtype=wide)
    hidden_MF = swiglu(gate_up_MF2, out_dtype=dtype)
    y_MD = grouped_gemm(hidden_MF, down_EDF, order.offsets_E1, out_dtype=dtype)
    return moe_combine(y_MD, order, weights_NJ, out_dtype=dtype), Kept(order, gate_up_MF2)
