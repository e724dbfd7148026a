"""As reference.py with state: the inputs of all taps come in one gather, and where they lie is
found out once for all convolutions of a batch.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, has_arrays, tensor
from suzuri.kernels.kept import kept


@np.errstate(all="ignore")
def short_conv(
    x_NC: Tensor,
    weight_CK: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    state_LRC: Tensor,
    slots_S: Tensor,
) -> Tensor:
    num_rows, taps = x_NC.shape[0], weight_CK.shape[1]
    sequence = (positions_N, seq_ids_N, seq_starts_S1, slots_S)
    plan = kept(_plan, *sequence, params=(taps, state_LRC.shape[1]))
    wide_NC, weight_KC = array(exact.widen(x_NC)), array(exact.widen(weight_CK)).T
    ring_XC = state_LRC.flatten(0, 1)
    if has_arrays(x_NC):
        before_XC = array(ring_XC).take(plan.ring_X, axis=0)
    else:
        before_XC = array(exact.widen(exact.take_rows(ring_XC, tensor(plan.ring_X))))
    if plan.absent_X is not None:
        before_XC[plan.absent_X] = 0.0
    if plan.source_X is not None:
        before_XC = np.concatenate([before_XC, wide_NC]).take(plan.source_X, axis=0)
    terms_NKC = before_XC.reshape(num_rows, taps - 1, -1)
    terms_NKC *= weight_KC[:-1]
    total_NC = terms_NKC[:, 0]
    for tap in range(1, taps - 1):
        total_NC = total_NC + terms_NKC[:, tap]
    total_NC = total_NC + weight_KC[-1] * wide_NC
    total_NC += wide_NC
    last_MC = x_NC if plan.last_M is None else exact.take_rows(x_NC, tensor(plan.last_M))
    if has_arrays(x_NC):
        array(ring_XC)[plan.target_M] = array(last_MC)
    else:
        ring_XC[tensor(plan.target_M)] = last_MC
    return tensor(total_NC).to(x_NC.dtype)


class _Plan(NamedTuple):
    """ring_X [N * (K-1)]: the ring row (of all slots in one list) of each row's earlier inputs,
    oldest first; absent_X [X]: those before position 0 (None: none). source_X: where they really
    lie, in the list of these and then the N rows of the batch (None: all in the ring). last_M: rows
    to remember (None: all), target_M: in which ring rows.
    """

    ring_X: Array
    absent_X: Array | None
    source_X: Array | None
    last_M: Array | None
    target_M: Array


def _plan(
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    slots_S: Tensor,
    taps: int,
    ring: int,
) -> _Plan:
    position_N, sequence_N, starts_S1 = map(array, (positions_N, seq_ids_N, seq_starts_S1))
    rows_N = np.arange(len(position_N))
    index_N = rows_N - starts_S1[sequence_N]
    back_K = np.arange(taps - 1, 0, -1)
    slots_N = array(slots_S)[sequence_N]
    before_NK = position_N[:, None] - back_K
    ring_NK = slots_N[:, None] * ring + before_NK % ring
    source_X = None
    if (index_N > 0).any():
        ring_place_NK = rows_N[:, None] * (taps - 1) + (taps - 1 - back_K)
        batch_place_NK = ring_NK.shape[0] * (taps - 1) + rows_N[:, None] - back_K
        is_inside_NK = index_N[:, None] >= back_K
        source_X = np.where(is_inside_NK, batch_place_NK, ring_place_NK).reshape(-1)
    absent_X = (before_NK < 0).reshape(-1)
    length_N = (starts_S1[1:] - starts_S1[:-1])[sequence_N]
    last_N = index_N >= length_N - ring
    target_N = slots_N * ring + position_N % ring
    last_M = None if last_N.all() else last_N.nonzero()[0]
    return _Plan(
        ring_X=ring_NK.reshape(-1),
        absent_X=absent_X if absent_X.any() else None,
        source_X=source_X,
        last_M=last_M,
        target_M=target_N if last_M is None else target_N[last_M],
    )
