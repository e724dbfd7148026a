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
    x_ND: Tensor,
    experts_NJ: Tensor,
    *,
    num_experts: int,
    num_slots: int | None = None,
    num_rows_1: Tensor | None = None,
) -> tuple[Tensor, Permutation]:
    """Copies each token to its J slots, slots sorted by expert, tokens in order within an expert.

    x_ND [N, D]; experts_NJ [N, J] int64 in [0, num_experts), or [N, K] of the first K slots of
    `num_slots`: then the others of every token are those of the last J - K experts. Rows from
    num_rows_1 [1] int64 on, which stays on the device, are padding: their slots are last, of no
    expert, and offsets end before them. Returns (rows_MD [N * J, D], the permutation). A stable
    sort and a select: no arithmetic. Gradient: x, summed over its slots in slot order; with padding
    there is none, and ValueError says so.
    """
    records = exact.records_gradient(x_ND) and not dispatch.is_forced()
    if records and num_rows_1 is not None:
        raise ValueError("moe_permute: rows of padding have no gradient")
    if not records and not dispatch.use_reference(x_ND):
        _check_kernel(x_ND)
        from suzuri.kernels.moe_permute import kernel

        rows_MD, *rest = kernel.moe_permute(
            x_ND, experts_NJ, num_experts, num_slots=num_slots, num_rows_1=num_rows_1
        )
        return rows_MD, Permutation(*rest)
    slots = num_slots or experts_NJ.shape[1]
    all_NJ = reference.all_slots(experts_NJ, slots, num_experts, num_rows_1)
    if records:
        from suzuri.kernels.moe_permute import gradient

        rows_MD, *rest = gradient.MoePermute.apply(x_ND, all_NJ, num_experts)
    elif dispatch.use_cpu(x_ND) and num_rows_1 is None:
        from suzuri.kernels.moe_permute import cpu

        rows_MD, *rest = cpu.moe_permute(x_ND, all_NJ, num_experts)
    else:
        rows_MD, *rest = reference.moe_permute(x_ND, all_NJ, num_experts)
    return rows_MD, Permutation(*rest)


def sort_slots(
    like_ND: Tensor,
    experts_NJ: Tensor,
    *,
    num_experts: int,
    num_slots: int | None = None,
    num_rows_1: Tensor | None = None,
) -> Permutation:
    """The permutation of `moe_permute` alone, for rows like `like_ND`, of which nothing is read."""
    if not dispatch.use_reference(like_ND):
        _check_kernel(like_ND)
        from suzuri.kernels.moe_permute import kernel

        _, *rest = kernel.moe_permute(
            None, experts_NJ, num_experts, num_slots=num_slots, num_rows_1=num_rows_1
        )
        return Permutation(*rest)
    none_N0 = like_ND.detach()[:, :0]
    options = {"num_slots": num_slots, "num_rows_1": num_rows_1}
    return moe_permute(none_N0, experts_NJ, num_experts=num_experts, **options)[1]


def copy_rows(x_ND: Tensor, permutation: Permutation) -> Tensor:
    """The rows [M, D] of `moe_permute` by a permutation that is known; without a gradient."""
    if dispatch.use_reference(x_ND) or not x_ND.shape[0]:
        num_slots = permutation.order_M.shape[0] // max(x_ND.shape[0], 1)
        return exact.take_rows(x_ND, permutation.order_M // max(num_slots, 1))
    _check_kernel(x_ND)
    from suzuri.kernels.moe_permute import kernel

    return kernel.copy_rows(x_ND, permutation)


def _check_kernel(x_ND: Tensor) -> None:
    if x_ND.device.type != "cuda" or x_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("moe_permute", x_ND)
