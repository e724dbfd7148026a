"""The router on a GPU: logits by our matrix kernel, always, then one program per token. For few
tokens the last of these programs to end also sorts the slots (`route`): a counter tells it that it
is the last, decides no value, and is back at zero after every launch, so that graphs can repeat it.

The library splits K at these few outputs, so it is never asked (docs/exactness.md, evidence).
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.matmul import kernel as matmul
from suzuri.kernels.triton_math import logsigmoid, sigmoid, tree_sum


@triton.jit
def _choose_one(
    logits,
    bias,
    global_scale,
    given,
    experts,
    weights,
    route_scale,
    token,
    R: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    R_PADDED: tl.constexpr,
    J_PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
):
    logits += token * (R + S)
    ids = tl.arange(0, R_PADDED)
    is_expert = ids < R
    score = sigmoid(tl.load(logits + ids, mask=is_expert, other=0.0))
    score += tl.load(bias + ids, mask=is_expert, other=0.0)
    # NaN first, as the reference ranks it: every id found is then an expert's, and none is written
    # as R_PADDED, whose slot the sort would place outside.
    score = tl.where(score != score, float("inf"), score)  # noqa: PLR0124 (NaN alone)
    free = is_expert
    for _ in tl.static_range(K):
        best = tl.max(tl.where(free, score, -float("inf")), axis=0)
        # Among equals the lowest id.
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
        # A given id that is no expert's must not be read.
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
    _choose_one(
        logits,
        bias,
        global_scale,
        given,
        experts,
        weights,
        route_scale,
        tl.program_id(0).to(tl.int64),
        R,
        S,
        K,
        R_PADDED,
        J_PADDED,
        HAS_GIVEN,
    )


@triton.jit
def _expert_at(
    experts,
    slot,
    M,
    real,
    E: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
):
    """int32 expert of slots, as moe_permute has them; of those behind the last too E."""
    token, j = slot // J, slot % J
    # From where the other programs wrote: not from this multiprocessor's own cache.
    at = experts + token * K + j
    chosen = tl.load(at, mask=(slot < M) & (j < K), other=0, cache_modifier=".cg")
    expert = tl.where(j < K, chosen.to(tl.int32), E - J + j)
    return tl.where(token < real, expert, E)


@triton.jit(do_not_specialize=["ticket", "N"])
def _route(
    logits,
    bias,
    global_scale,
    given,
    experts,
    weights,
    route_scale,
    tickets,
    ticket,
    num_rows,
    order,
    inverse,
    offsets,
    N,
    R: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    R_PADDED: tl.constexpr,
    J_PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    """`_choose`, and by the last program to end the stable sort of all slots (at most MOST)."""
    _choose_one(
        logits,
        bias,
        global_scale,
        given,
        experts,
        weights,
        route_scale,
        tl.program_id(0).to(tl.int64),
        R,
        S,
        K,
        R_PADDED,
        J_PADDED,
        HAS_GIVEN,
    )
    # Every thread has written before one of them takes the number.
    tl.debug_barrier()
    number = tl.atomic_add(tickets + ticket, 1, sem="acq_rel")
    if number == N - 1:
        tl.store(tickets + ticket, 0)
        M, real = N * (K + S), N
        if HAS_ROWS:
            real = tl.minimum(tl.load(num_rows).to(tl.int32), N)
        slot = tl.arange(0, MOST)
        expert = _expert_at(experts, slot, M, real, R + S, K, K + S)
        key = expert * MOST + slot
        place = tl.zeros((MOST,), dtype=tl.int32)
        for step in tl.static_range(MOST // STEP):
            other = step * STEP + tl.arange(0, STEP)
            their = _expert_at(experts, other, M, real, R + S, K, K + S) * MOST + other
            place += tl.sum((their[None, :] < key[:, None]).to(tl.int32), axis=1)
        tl.store(order + place, slot.to(tl.int64), mask=slot < M)
        tl.store(inverse + slot, place.to(tl.int64), mask=slot < M)
        count = tl.histogram(expert, BINS)
        first = tl.cumsum(count, axis=0) - count
        bins = tl.arange(0, BINS)
        tl.store(offsets + bins, first.to(tl.int64), mask=bins <= R + S)


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


MOST_ROWS = 8
"""Tokens up to which the last program sorts: alone, it compares all pairs of slots, which for one
token is quicker than a launch more, and for 64 takes many times as long (measured)."""
EAGER, CAPTURED = 1 << 12, 1 << 16
"""Counters for launches, by turns, and for those that a graph repeats, one for each: two launches
that run at a time never share one."""


class _Tickets:
    """The counters of a device."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(EAGER + CAPTURED, dtype=torch.int32, device=device)
        self.eager, self.captured = itertools.count(), itertools.count()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once: any stream may come next


_tickets: dict[torch.device, _Tickets] = {}


def _ticket(device: torch.device) -> tuple[Tensor, int] | None:
    """A counter that is zero; None where a graph is captured and there is none for it."""
    captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    held = _tickets.get(device)
    if held is None:
        if captures:
            return None  # its memory would be the graph's
        held = _tickets.setdefault(device, _Tickets(device))
    if not captures:
        return held.counters, next(held.eager) % EAGER
    number = next(held.captured)
    return (held.counters, EAGER + number) if number < CAPTURED else None


def route(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
    num_rows_1: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`router`, and (order, inverse, offsets) of all slots, or None: too many, or no counter."""
    n, routed, k = x_ND.shape[0], bias_R.shape[0], num_experts_per_token
    given = (x_ND, weight_ED, bias_R, global_scale_1, k, route_scale, given_NK)
    held = _ticket(x_ND.device) if 0 < n <= MOST_ROWS else None
    if held is None:
        return *router(*given), None
    experts, shared = weight_ED.shape[0], weight_ED.shape[0] - routed
    m = n * (k + shared)
    logits_NE = matmul.ours(x_ND, weight_ED, 1.0, torch.float32)
    experts_NK = logits_NE.new_empty(n, k, dtype=torch.int64)
    weights_NJ = logits_NE.new_empty(n, k + shared)
    order_M, inverse_M = experts_NK.new_empty(m), experts_NK.new_empty(m)
    offsets_E1 = experts_NK.new_empty(experts + 1)
    most = max(16, triton.next_power_of_2(m))
    _route[(n,)](
        logits_NE,
        bias_R.contiguous(),
        global_scale_1,
        experts_NK if given_NK is None else given_NK.contiguous(),
        experts_NK,
        weights_NJ,
        route_scale,
        *held,
        offsets_E1 if num_rows_1 is None else num_rows_1,
        order_M,
        inverse_M,
        offsets_E1,
        n,
        R=routed,
        S=shared,
        K=k,
        R_PADDED=triton.next_power_of_2(routed),
        J_PADDED=triton.next_power_of_2(k + shared),
        HAS_GIVEN=given_NK is not None,
        HAS_ROWS=num_rows_1 is not None,
        BINS=triton.next_power_of_2(experts + 1),
        MOST=most,
        STEP=min(32, most),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return experts_NK, weights_NJ, logits_NE, (order_M, inverse_M, offsets_E1)
