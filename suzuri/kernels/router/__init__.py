"""Sigmoid router with a selection bias and shared experts in one joint normalisation."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.moe_permute import Permutation
from suzuri.kernels.router import reference


def router(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    *,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses k of R routed experts per token and weighs them jointly with the S shared ones.

    x_ND [N, D] and weight_ED [R+S, D], one dtype, the last S rows of the weight belonging to the
    shared experts; bias_R [R] and global_scale_1 [1] in fp32 (at least). Returns
    (experts_NK int64 [N, k] ascending ids, weights_NJ fp32 [N, k+S] in that order then shared,
    logits_NE fp32 [N, R+S]).

    choice = top-k of sigmoid(logits[:R]) + bias, ties to the lowest id: the bias chooses and never
    weighs. weights = softmax(logsigmoid(a)) * route_scale * global_scale with a = the raw logits of
    the chosen and shared experts (log space: finite logits cannot give 0/0). All in fp32 from fp32
    accumulators. Gradients: x, weight, global_scale; the bias has none. Source:
    docs/architecture.md 2.6.

    given_NK int64 [N, k]: experts to take in place of the choice, ids below R rising within a row
    (not looked at here); a row that begins with a negative id chooses itself. Weights and gradients
    are those of the logits of whichever experts are taken.
    """
    _check(x_ND, weight_ED, bias_R, num_experts_per_token, given_NK)
    if exact.records_gradient(x_ND, weight_ED, global_scale_1) and not dispatch.is_forced():
        from suzuri.kernels.router import gradient

        return gradient.Router.apply(
            x_ND, weight_ED, bias_R, global_scale_1, num_experts_per_token, route_scale, given_NK
        )
    if dispatch.use_cpu(x_ND, weight_ED, global_scale_1):
        from suzuri.kernels.router import cpu

        return cpu.router(
            x_ND, weight_ED, bias_R, global_scale_1, num_experts_per_token, route_scale, given_NK
        )
    if dispatch.use_reference(x_ND):
        return reference.router(
            x_ND, weight_ED, bias_R, global_scale_1, num_experts_per_token, route_scale, given_NK
        )
    if x_ND.device.type != "cuda" or x_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("router", x_ND)
    from suzuri.kernels.router import kernel

    return kernel.router(
        x_ND, weight_ED, bias_R, global_scale_1, num_experts_per_token, route_scale, given_NK
    )


def route(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    *,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
    num_rows_1: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Permutation | None]:
    """`router`, and behind its results what `moe_permute.sort_slots` finds for its choice and the
    shared experts where the same launch finds that too (few rows on a GPU), or None.

    num_rows_1 as in `sort_slots`. The rest, errors included, as in `router`.
    """
    settings = {"num_experts_per_token": num_experts_per_token, "route_scale": route_scale}
    covered = x_ND.dtype in (torch.bfloat16, torch.float32) and x_ND.dtype == weight_ED.dtype
    records = exact.records_gradient(x_ND, weight_ED, global_scale_1)
    if records or dispatch.is_forced() or x_ND.device.type != "cuda" or not covered:
        given = (x_ND, weight_ED, bias_R, global_scale_1)
        return *router(*given, **settings, given_NK=given_NK), None
    _check(x_ND, weight_ED, bias_R, num_experts_per_token, given_NK)
    from suzuri.kernels.router import kernel

    given = (x_ND, weight_ED, bias_R, global_scale_1, num_experts_per_token, route_scale, given_NK)
    found = kernel.route(*given, num_rows_1)
    experts_NK, weights_NJ, logits_NE, order = found
    return experts_NK, weights_NJ, logits_NE, None if order is None else Permutation(*order)


def _check(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    num_experts_per_token: int,
    given_NK: Tensor | None,
) -> None:
    routed = bias_R.shape[0]
    if not 1 <= num_experts_per_token <= routed <= weight_ED.shape[0]:
        raise ValueError(
            f"router: top {num_experts_per_token} of {routed} with {weight_ED.shape[0]} rows"
        )
    if x_ND.dtype != weight_ED.dtype:
        raise ValueError(f"router: x is {x_ND.dtype}, weight is {weight_ED.dtype}")
    if given_NK is not None and (
        given_NK.dtype != torch.int64 or given_NK.shape != (x_ND.shape[0], num_experts_per_token)
    ):
        raise ValueError(
            f"router: given is {given_NK.dtype} {list(given_NK.shape)}; need int64 "
            f"{[x_ND.shape[0], num_experts_per_token]}"
        )
