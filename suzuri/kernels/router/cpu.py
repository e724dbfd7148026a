"""As reference.py; logsigmoid is torch's own."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import check_indices, loop, spread
from suzuri.kernels.loops import exp, products, tree

WORK = 40
"""Of one score, in multiplications."""


@loop
def _choose(x, weight, bias, given, logits, experts, raw, first, last):
    """The logits; the k largest biased scores of each row, lowest id first on ties, NaN above all
    (so has it torch.sort), in ascending order, or the given ones; the raw logits of these and the
    shared ones. `given` has no rows where none are."""
    k = experts.shape[1]
    routed, shared = bias.size, logits.shape[1] - bias.size
    products(x[first:last], weight, logits[first:last], 0, logits.shape[1])
    score, is_free = np.empty(routed, np.float32), np.empty(routed, np.bool_)
    for n in range(first, last):
        if given.shape[0] > 0 and given[n, 0] >= 0:
            for j in range(k):
                experts[n, j] = given[n, j]
        else:
            for e in range(routed):
                sigmoid = np.float32(1.0) / (np.float32(1.0) + np.float32(exp(-logits[n, e])))
                score[e] = sigmoid + bias[e]
                is_free[e] = True
            for _ in range(k):
                best = -1
                for e in range(routed):
                    if is_free[e]:
                        is_nan = np.isnan(score[e]) and not np.isnan(score[best])
                        if best < 0 or score[e] > score[best] or is_nan:
                            best = e
                is_free[best] = False
            j = 0
            for e in range(routed):
                if not is_free[e]:
                    experts[n, j] = e
                    j += 1
        for j in range(k):
            e = experts[n, j]
            raw[n, j] = logits[n, e]
        for s in range(shared):
            raw[n, k + s] = logits[n, routed + s]


@loop
def _weigh(logs, route_scale, global_scale, weights):
    rows, slots = logs.shape
    scale = np.float32(route_scale) * global_scale[0]
    terms = np.empty(slots, np.float32)
    for n in range(rows):
        most = logs[n, 0]
        for j in range(1, slots):
            if logs[n, j] > most or np.isnan(logs[n, j]):
                most = logs[n, j]
        for j in range(slots):
            terms[j] = exp(logs[n, j] - most)
            weights[n, j] = terms[j]
        total = tree(terms, slots)
        for j in range(slots):
            weights[n, j] = weights[n, j] / total * scale


def router(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    num_experts_per_token: int,
    route_scale: float,
    given_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, num_rows = array(exact.widen(x_ND).contiguous()), weight_ED.shape[0]
    logits = empty(len(x), num_rows)
    experts = np.empty((len(x), num_experts_per_token), np.int64)
    raw = empty(len(x), num_experts_per_token + num_rows - bias_R.shape[0])
    given = np.empty((0, num_experts_per_token), np.int64)
    if given_NK is not None:
        given = given_NK.contiguous().numpy()
        check_indices(np.where(given < 0, 0, given).reshape(-1), bias_R.shape[0])
    weight, bias = exact.transposed(weight_ED), exact.widened(bias_R)
    all_of_it = (x, weight, bias, given, logits, experts, raw)
    work = logits.size * (x.shape[1] + WORK)
    spread(work, len(x), lambda first, last: _choose(*all_of_it, first, last))
    log_NJ = logsigmoid(tensor(raw))
    _weigh(array(log_NJ), route_scale, exact.widened(global_scale_1), raw)
    return torch.from_numpy(experts), tensor(raw), tensor(logits)
