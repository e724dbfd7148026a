"""The router by its formulas."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from suzuri.kernels import exact


def router(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    routed = bias_R.shape[0]
    logits_NE = exact.accumulate(x_ND, weight_ED)
    score_NR = exact.sigmoid(logits_NE[:, :routed].detach()) + bias_R.detach()
    experts_NK = torch.sort(exact.top_k(score_NR, num_experts_per_token), dim=-1).values
    if given_NK is not None:
        experts_NK = torch.where(given_NK[:, :1] < 0, experts_NK, given_NK)
    raw_NJ = torch.cat([exact.select(logits_NE, experts_NK), logits_NE[:, routed:]], 1)
    log_NJ = logsigmoid(raw_NJ)
    share_NJ = exact.exp(log_NJ - log_NJ.detach().amax(-1, keepdim=True))
    share_NJ = share_NJ / exact.tree_sum(share_NJ)[:, None]
    weights_NJ = share_NJ * (route_scale * global_scale_1.to(share_NJ.dtype))
    return experts_NK, weights_NJ, logits_NE
