"""The router on a GPU: logits by our matrix kernel, always, then one program per token.

The library splits K at these few outputs, so it is never asked (docs/exactness.md, evidence).
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.matmul import kernel as matmul
from suzuri.kernels.triton_math import logsigmoid, sigmoid, tree_sum


@triton.jit
def _choose(
    logits,
    bias,
    global_scale,
    given,
    experts,
    weights,
    route_scale,
    R: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    R_PADDED: tl.constexpr,
    J_PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * (R + S)
    ids = tl.arange(0, R_PADDED)
    is_expert = ids < R
    score = sigmoid(tl.load(logits + ids, mask=is_expert, other=0.0))
    score += tl.load(bias + ids, mask=is_expert, other=0.0)
    free = is_expert
    for _ in tl.static_range(K):
        best = tl.max(tl.where(free, score, -float("inf")), axis=0)
        # Among equals the lowest id. (No score is NaN: then nothing would be found.)
        found = tl.min(tl.where(free & (score >= best), ids, R_PADDED), axis=0)
        free = free & (ids != found)
    chosen = is_expert & (free == 0)

    slots = tl.arange(0, J_PADDED)
    raw = tl.zeros((J_PADDED,), dtype=tl.float32)
    for slot in tl.static_range(K):
        lowest = tl.min(tl.where(chosen, ids, R_PADDED), axis=0)
        chosen = chosen & (ids != lowest)
        if HAS_GIVEN:
            taken = tl.load(given + token * K + slot).to(tl.int32)
            lowest = tl.where(tl.load(given + token * K) < 0, lowest, taken)
        tl.store(experts + token * K + slot, lowest.to(tl.int64))
        # A padded id (only after NaN) must not be read.
        raw = tl.where(slots == slot, tl.load(logits + tl.minimum(lowest, R - 1)), raw)
    is_shared = (slots >= K) & (slots < K + S)
    raw = tl.where(is_shared, tl.load(logits + R + slots - K, mask=is_shared, other=0.0), raw)

    is_slot = slots < K + S
    log_share = tl.where(is_slot, logsigmoid(raw), -float("inf"))
    share = tl.exp(log_share - tl.max(log_share, axis=0))
    total = tree_sum(tl.reshape(share, (1, J_PADDED)))
    share = tl.div_rn(share, tl.broadcast_to(total, (J_PADDED,)))
    weight = share * (route_scale * tl.load(global_scale).to(tl.float32))
    tl.store(weights + token * (K + S) + slots, weight, mask=is_slot)


def router(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
    tile: matmul.Tile | None = None,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    n, routed, k = x_ND.shape[0], bias_R.shape[0], num_experts_per_token
    shared = weight_ED.shape[0] - routed
    logits_NE = matmul.ours(x_ND, weight_ED, 1.0, torch.float32, tile)
    experts_NK = logits_NE.new_empty(n, k, dtype=torch.int64)
    weights_NJ = logits_NE.new_empty(n, k + shared)
    if n:
        _choose[(n,)](
            logits_NE,
            bias_R.contiguous(),
            global_scale_1,
            experts_NK if given_NK is None else given_NK.contiguous(),
            experts_NK,
            weights_NJ,
            route_scale,
            R=routed,
            S=shared,
            K=k,
            R_PADDED=triton.next_power_of_2(routed),
            J_PADDED=triton.next_power_of_2(k + shared),
            HAS_GIVEN=given_NK is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return experts_NK, weights_NJ, logits_NE
