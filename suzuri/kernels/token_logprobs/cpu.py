"""As reference.py: a product of a vocabulary chunk, then its logits row by row."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import loop, spread
from suzuri.kernels.log_softmax.cpu import EMPTY_MAX, LANES, WORK, fold_row
from suzuri.kernels.log_softmax.reference import CHUNK, normalizer


@loop
def _add_chunk(logits, at, targets, scale, temperature, with_moment, states, found, first, last):
    """Folds the logits of ids from `at` on, which it overwrites, into the states of some rows."""
    width = logits.shape[1]
    terms, lanes = np.empty(2 * width, np.float32), np.empty(LANES, np.float32)
    is_scaled, is_tempered = scale != np.float32(1.0), temperature.size > 0
    for n in range(first, last):
        row = logits[n]
        if is_scaled:
            for i in range(width):
                row[i] = row[i] * scale
        if is_tempered:
            divisor = temperature[n]
            for i in range(width):
                row[i] = row[i] / divisor
        fold_row(row, states[n], with_moment, terms, lanes)
        for k in range(targets.shape[1]):
            place = targets[n, k] - at
            if 0 <= place < width:
                found[n, k] = row[place]


def statistics(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_NK: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    exact.check_indices(targets_NK, unembed_VD.shape[0], "target")
    rows = h_ND.shape[0]
    target_NK = torch.zeros(targets_NK.shape)
    states = empty(rows, 3)
    states[:, 0], states[:, 1:] = EMPTY_MAX, 0.0
    temperature = empty(0)
    if temperature_N is not None:
        temperature = array(temperature_N.to(torch.float32).contiguous())
    targets, found = array(targets_NK.contiguous()), array(target_NK)
    for number, rows_BD in enumerate(unembed_VD.split(CHUNK)):
        logits = array(exact.accumulate(h_ND, rows_BD))
        given = (number * CHUNK, targets, np.float32(scale), temperature, with_entropy)
        spread(
            WORK * logits.size,
            rows,
            lambda first, last, logits=logits, given=given: _add_chunk(
                logits, *given, states, found, first, last
            ),
        )
    most_N, total_N, moment_N = tensor(states).unbind(1)
    normalizer_N = normalizer((most_N, total_N))
    entropy_N = torch.log(total_N) - moment_N / total_N if with_entropy else None
    return target_NK - normalizer_N[:, None], normalizer_N, entropy_N
