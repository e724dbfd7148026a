"""The router with a gradient: the op as it is, and its derivative by hand.

The bias only chooses, so it has none. Saved: the inputs, the chosen ids, the raw logits of the
chosen and shared experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import exact
from suzuri.kernels.router import router


class Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_ED: Tensor,
        bias_R: Tensor,
        global_scale_1: Tensor,
        num_experts_per_token: int,
        route_scale: float,
        given_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        experts_NK, weights_NJ, logits_NE = router(
            x_ND,
            weight_ED,
            bias_R,
            global_scale_1,
            num_experts_per_token=num_experts_per_token,
            route_scale=route_scale,
            given_NK=given_NK,
        )
        routed = bias_R.shape[0]
        raw_NJ = torch.cat([exact.select(logits_NE, experts_NK), logits_NE[:, routed:]], 1)
        ctx.save_for_backward(x_ND, weight_ED, global_scale_1, experts_NK, raw_NJ)
        ctx.routed, ctx.route_scale = routed, route_scale
        ctx.mark_non_differentiable(experts_NK)
        ctx.set_materialize_grads(False)
        return experts_NK, weights_NJ, logits_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED, global_scale_1, experts_NK, raw_NJ = ctx.saved_tensors
        _, grad_weights_NJ, grad_logits_NE = grads
        needs_x, needs_weight, _, needs_scale = ctx.needs_input_grad[:4]
        wide = raw_NJ.dtype
        grad_scale = None
        if grad_weights_NJ is not None:
            grad_weights_NJ = grad_weights_NJ.to(wide)
            # share = softmax of logsigmoid(raw) = log(kept), kept = 1 / (1 + exp(-raw)).
            log_NJ = torch.nn.functional.logsigmoid(raw_NJ)
            share_NJ = torch.exp(log_NJ - log_NJ.amax(-1, keepdim=True))
            share_NJ = share_NJ / share_NJ.sum(-1, keepdim=True)
            if needs_scale:
                of_shares = (grad_weights_NJ * share_NJ).sum()
                grad_scale = (of_shares * ctx.route_scale).reshape(global_scale_1.shape)
            if needs_x or needs_weight:
                scale = ctx.route_scale * global_scale_1.to(wide)
                grad_NJ = grad_weights_NJ * scale
                mean_N1 = (grad_NJ * share_NJ).sum(-1, keepdim=True)
                # The derivative of logsigmoid is 1 - kept, without the cancellation exp(-softplus).
                left_NJ = torch.exp(torch.nn.functional.logsigmoid(-raw_NJ))
                grad_raw_NJ = share_NJ * (grad_NJ - mean_N1) * left_NJ
                grad_logits_NE = _spread(
                    grad_raw_NJ, experts_NK, ctx.routed, weight_ED.shape[0], grad_logits_NE
                )
        grad_x = grad_weight = None
        if grad_logits_NE is not None:
            if needs_x:
                grad_x = torch.mm(grad_logits_NE, weight_ED.to(wide))
                grad_x = grad_x.to(x_ND.dtype)
            if needs_weight:
                grad_weight = torch.mm(grad_logits_NE.T, x_ND.to(wide))
        return grad_x, grad_weight, None, grad_scale, None, None, None


def _spread(
    grad_raw_NJ: Tensor, experts_NK: Tensor, routed: int, rows: int, more_NE: Tensor | None
) -> Tensor:
    """Gradients of the raw logits at their places among all logits: plain writes, as no id is
    chosen twice."""
    k = experts_NK.shape[1]
    grad_NE = grad_raw_NJ.new_zeros(grad_raw_NJ.shape[0], rows)
    grad_NE.scatter_(1, experts_NK, grad_raw_NJ[:, :k])
    grad_NE[:, routed:] = grad_raw_NJ[:, k:]
    return grad_NE if more_NE is None else grad_NE + more_NE
