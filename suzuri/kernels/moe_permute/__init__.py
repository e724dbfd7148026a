"""Sorts tokens by the experts they go to."""

from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.moe_permute import reference


class Permutation(NamedTuple):
    """Rows sorted by expert, M = N * J.

    order_M [M] int64: flat (token, slot) index of sorted row m; inverse_M [M]: sorted row of flat
    index n * J + j; offsets_E1 [E+1]: first sorted row of expert e.
    """

    order_M: Tensor
    inverse_M: Tensor
    offsets_E1: Tensor


def moe_permute(
    x_ND: Tensor, experts_NJ: Tensor, *, num_experts: int
) -> tuple[Tensor, Permutation]:
    """Copies each token to its J slots, slots sorted by expert, tokens in order within an expert.

    x_ND [N, D]; experts_NJ [N, J] int64 in [0, num_experts). Returns (rows_MD [N * J, D], the
    permutation). A stable sort and a select: no arithmetic. Gradient: x, summed over its slots in
    slot order.
    """
    if exact.records_gradient(x_ND) and not dispatch.is_forced():
        from suzuri.kernels.moe_permute import gradient

        rows_MD, *rest = gradient.MoePermute.apply(x_ND, experts_NJ, num_experts)
        return rows_MD, Permutation(*rest)
    if dispatch.use_cpu(x_ND):
        from suzuri.kernels.moe_permute import cpu

        rows_MD, *rest = cpu.moe_permute(x_ND, experts_NJ, num_experts)
        return rows_MD, Permutation(*rest)
    if dispatch.use_reference(x_ND):
        rows_MD, *rest = reference.moe_permute(x_ND, experts_NJ, num_experts)
        return rows_MD, Permutation(*rest)
    if x_ND.device.type != "cuda" or x_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("moe_permute", x_ND)
    from suzuri.kernels.moe_permute import kernel

    rows_MD, *rest = kernel.moe_permute(x_ND, experts_NJ, num_experts)
    return rows_MD, Permutation(*rest)
