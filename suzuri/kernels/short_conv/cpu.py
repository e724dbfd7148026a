"""As reference.py with state, row by row; every row reads the rings before one is written."""

import numpy as np
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, lasting, tensor
from suzuri.kernels.compiled import check_indices, lasting_words, loop, words
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
