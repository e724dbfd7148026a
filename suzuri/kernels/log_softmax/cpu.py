"""As reference.py, row by row; `fold_row` is shared with token_logprobs."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread
from suzuri.kernels.log_softmax.reference import CHUNK, normalizer
from suzuri.kernels.loops import exp, tree

LANES = 64
WORK = 12
"""Of one logit, in multiplications."""
EMPTY_MAX = torch.finfo(torch.float32).min


@loop
def largest(x, lanes):
    """The max of x, at least EMPTY_MAX; NaN if there is one. `lanes` is room for LANES numbers."""
    size, num_nans = x.size, 0
    whole = size - size % LANES
    for j in range(LANES):
        lanes[j] = EMPTY_MAX
    for i in range(0, whole, LANES):
        part = x[i : i + LANES]
        for j in range(LANES):
            lanes[j] = part[j] if part[j] > lanes[j] else lanes[j]
    for i in range(whole, size):
        lanes[0] = x[i] if x[i] > lanes[0] else lanes[0]
    for i in range(size):
        num_nans += x[i] != x[i]
    most = lanes[0]
    for j in range(1, LANES):
        most = lanes[j] if lanes[j] > most else most
    if num_nans:
        for i in range(size):
            most = x[i] if np.isnan(x[i]) else most
    return most


@loop
def fold_row(x, state, with_moment, terms, lanes):
    """Folds one vocabulary chunk x of a row into its state: max, sum, moment (`reference.fold`, and
    what token_logprobs adds to it). `terms` is room for x.size numbers."""
    size = x.size
    most = largest(x, lanes)
    for i in range(size):
        terms[i] = exp(x[i] - most)
    own_moment = np.float32(0.0)
    if with_moment:
        shares = terms[size : 2 * size]
        for i in range(size):
            shares[i] = terms[i] * (x[i] - most)
        own_moment = tree(shares, size)
    own = tree(terms, size)
    old, total = state[0], state[1]
    new = old if old > most or np.isnan(old) else most
    lost, less = old - new, most - new
    kept, part = np.float32(exp(lost)), np.float32(exp(less))
    state[0], state[1] = new, total * kept + own * part
    if with_moment:
        moment = kept * (state[2] + lost * total)
        state[2] = moment + part * (own_moment + less * own)


@loop
def _stats(logits, states, first, last):
    terms, lanes = np.empty(CHUNK, np.float32), np.empty(LANES, np.float32)
    vocabulary = logits.shape[1]
    for n in range(first, last):
        states[n, 0], states[n, 1] = EMPTY_MAX, 0.0
        for start in range(0, vocabulary, CHUNK):
            chunk = logits[n, start : min(vocabulary, start + CHUNK)]
            fold_row(chunk, states[n], False, terms, lanes)


def log_softmax(logits_NV: Tensor) -> Tensor:
    logits_NV = exact.widen(logits_NV).contiguous()
    logits, states = array(logits_NV), empty(logits_NV.shape[0], 2)
    work = WORK * logits.size
    spread(work, len(logits), lambda first, last: _stats(logits, states, first, last))
    most_N, total_N = tensor(states).unbind(1)
    return logits_NV - normalizer((most_N, total_N))[:, None]
