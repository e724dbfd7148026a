"""As reference.py and gradient.py, row by row; every row reads the rings before one is written."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, empty, lasting, tensor
from suzuri.kernels.compiled import check_indices, lasting_words, loop, spread, words
from suzuri.kernels.kept import kept
from suzuri.kernels.loops import add_tap


@loop
def _conv(x, x_words, weight, positions, seq_ids, starts, state, slots, y):
    rows, channels = x.shape
    taps, ring = weight.shape[0], state.shape[1]
    zeros = np.zeros(channels, np.float32)
    check_indices(slots, state.shape[0])
    for n in range(rows):
        sequence, position = seq_ids[n], positions[n]
        index, slot = n - starts[sequence], slots[sequence]
        for tap in range(taps):
            back = taps - 1 - tap
            if back <= index:
                add_tap(y[n], weight[tap], x[n - back], tap == 0)
            elif back <= position:
                remembered = state[slot, (position - back) % ring]
                add_tap(y[n], weight[tap], remembered, tap == 0)
            else:
                add_tap(y[n], weight[tap], zeros, tap == 0)
        for c in range(channels):
            y[n, c] += x[n, c]
    for n in range(rows):
        sequence = seq_ids[n]
        length = starts[sequence + 1] - starts[sequence]
        if n - starts[sequence] >= length - ring:
            place = state[slots[sequence], positions[n] % ring]
            for c in range(channels):
                place[c] = x_words[n, c]


def short_conv(
    x_NC: Tensor,
    weight_CK: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    state_LRC: Tensor,
    slots_S: Tensor,
) -> Tensor:
    x_NC = x_NC.contiguous()
    wide_NC = exact.widen(x_NC)
    wide = array(wide_NC)
    own = wide if wide_NC is x_NC else words(x_NC)
    y = empty(*wide.shape)
    _conv(
        wide,
        own,
        exact.transposed(weight_CK),
        lasting(positions_N),
        lasting(seq_ids_N),
        lasting(seq_starts_S1),
        lasting_words(state_LRC),
        lasting(slots_S),
        y,
    )
    return tensor(y, x_NC.dtype)


@loop
def _conv_packed(x, weight, index, y, first, last):
    """Without state: before the first row of a sequence is nothing."""
    channels, taps = x.shape[1], weight.shape[0]
    zeros = np.zeros(channels, np.float32)
    for n in range(first, last):
        for tap in range(taps):
            back = taps - 1 - tap
            add_tap(y[n], weight[tap], x[n - back] if back <= index[n] else zeros, tap == 0)
        for c in range(channels):
            y[n, c] += x[n, c]


@loop
def _conv_four_taps(x, weight, index, y, first, last):
    """As _conv_packed, in one pass over each row."""
    channels = x.shape[1]
    zeros = np.zeros(channels, np.float32)
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    for n in range(first, last):
        own, out = x[n], y[n]
        x0 = x[n - 3] if index[n] >= 3 else zeros
        x1 = x[n - 2] if index[n] >= 2 else zeros
        x2 = x[n - 1] if index[n] >= 1 else zeros
        for c in range(channels):
            total = ((w0[c] * x0[c] + w1[c] * x1[c]) + w2[c] * x2[c]) + w3[c] * own[c]
            out[c] = total + own[c]


def short_conv_packed(
    x_NC: Tensor, weight_CK: Tensor, seq_ids_N: Tensor, seq_starts_S1: Tensor
) -> Tensor:
    x, weight = array(exact.widen(x_NC).contiguous()), exact.transposed(weight_CK)
    index, y = _index(seq_ids_N, seq_starts_S1), empty(*x.shape)
    run = _conv_four_taps if weight.shape[0] == 4 else _conv_packed
    work = weight.shape[0] * x.size
    spread(work, x.shape[0], lambda first, last: run(x, weight, index, y, first, last))
    return tensor(y, x_NC.dtype)


def _index(seq_ids_N: Tensor, seq_starts_S1: Tensor) -> Array:
    """How many rows of its sequence are before each row."""
    return kept(_index_in_sequence, seq_ids_N, seq_starts_S1)


def _index_in_sequence(seq_ids_N: Tensor, seq_starts_S1: Tensor) -> Array:
    return array(torch.arange(seq_ids_N.shape[0]) - seq_starts_S1[seq_ids_N])


@loop
def _conv_backward(x, weight, index, grad, grad_x, grad_weight, first, last):
    """See gradient.py; parts `first` to `last` of the rows, each with a grad_weight of its own."""
    rows, channels = x.shape
    parts, taps = grad_weight.shape[:2]
    for part in range(first, last):
        for n in range(rows * part // parts, rows * (part + 1) // parts):
            own, y = x[n], grad_x[n]
            y[:] = grad[n]
            for back in range(taps):
                tap, later = taps - 1 - back, n + back
                if later < rows and index[later] >= back:
                    given, factor, total = grad[later], weight[tap], grad_weight[part, tap]
                    for c in range(channels):
                        y[c] += factor[c] * given[c]
                        total[c] += given[c] * own[c]


def _four_taps_backward(x, weight, index, grad, grad_x, grad_weight, first, last):
    """As _conv_backward, in two passes over each row."""
    rows, channels = x.shape
    parts = grad_weight.shape[0]
    zeros = np.zeros(channels, np.float32)
    w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
    for part in range(first, last):
        totals = grad_weight[part]
        t0, t1, t2, t3 = totals[0], totals[1], totals[2], totals[3]
        for n in range(rows * part // parts, rows * (part + 1) // parts):
            own, y, g0 = x[n], grad_x[n], grad[n]
            g1 = grad[n + 1] if n + 1 < rows and index[n + 1] >= 1 else zeros
            g2 = grad[n + 2] if n + 2 < rows and index[n + 2] >= 2 else zeros
            g3 = grad[n + 3] if n + 3 < rows and index[n + 3] >= 3 else zeros
            for c in range(channels):
                taps = w3[c] * g0[c] + w2[c] * g1[c] + w1[c] * g2[c] + w0[c] * g3[c]
                y[c] = g0[c] + taps
            for c in range(channels):
                t3[c] += g0[c] * own[c]
                t2[c] += g1[c] * own[c]
                t1[c] += g2[c] * own[c]
                t0[c] += g3[c] * own[c]


four_taps_backward = loop(_four_taps_backward, reordered=True)

PARTS = 8
"""Partial sums of the weight's gradient, however many threads there are."""


def short_conv_backward(
    x_NC: Tensor, weight_CK: Tensor, seq_ids_N: Tensor, seq_starts_S1: Tensor, grad_NC: Tensor
) -> tuple[Tensor, Tensor]:
    x, grad = array(exact.widen(x_NC).contiguous()), array(exact.widen(grad_NC).contiguous())
    weight, index = exact.transposed(weight_CK), _index(seq_ids_N, seq_starts_S1)
    grad_x, parts = empty(*x.shape), np.zeros((PARTS, *weight.shape), np.float64)
    given = (x, weight, index, grad, grad_x, parts)
    run = four_taps_backward if weight.shape[0] == 4 else _conv_backward
    spread(2 * weight.shape[0] * x.size, PARTS, lambda first, last: run(*given, first, last))
    grad_weight = exact.tree_sum(torch.from_numpy(parts).permute(2, 1, 0)).to(torch.float32)
    return tensor(grad_x, x_NC.dtype), grad_weight
