"""The convolution tap by tap: an input comes from the batch, else from the ring, else it is 0."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def short_conv(
    x_NC: Tensor,
    weight_CK: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    state_LRC: Tensor | None,
    slots_S: Tensor | None,
) -> Tensor:
    num_rows, taps = x_NC.shape[0], weight_CK.shape[1]
    index_N = torch.arange(num_rows, device=x_NC.device) - seq_starts_S1[seq_ids_N]
    wide_NC, weight_KC = exact.widen(x_NC), exact.widen(weight_CK).T
    sum_NC: Tensor | None = None
    for back in range(taps - 1, -1, -1):
        moved = min(back, num_rows)
        shifted_NC = torch.cat([torch.zeros_like(wide_NC[:moved]), wide_NC[: num_rows - moved]])
        if back:
            before_NC = torch.zeros_like(wide_NC)
            if state_LRC is not None and slots_S is not None:
                row_N = (positions_N - back) % state_LRC.shape[1]
                kept_NC = state_LRC[slots_S[seq_ids_N], row_N].to(wide_NC.dtype)
                before_NC = torch.where((positions_N >= back)[:, None], kept_NC, before_NC)
            shifted_NC = torch.where((index_N >= back)[:, None], shifted_NC, before_NC)
        term_NC = weight_KC[taps - 1 - back] * shifted_NC
        sum_NC = term_NC if sum_NC is None else sum_NC + term_NC
    assert sum_NC is not None
    if state_LRC is not None and slots_S is not None:
        _remember(x_NC, index_N, positions_N, seq_ids_N, seq_starts_S1, state_LRC, slots_S)
    return (sum_NC + wide_NC).to(x_NC.dtype)


def _remember(
    x_NC: Tensor,
    index_N: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    state_LRC: Tensor,
    slots_S: Tensor,
) -> None:
    """Writes the last R inputs of each sequence to its ring (earlier ones would be overwritten)."""
    ring = state_LRC.shape[1]
    length_N = (seq_starts_S1[1:] - seq_starts_S1[:-1])[seq_ids_N]
    last_M = (index_N >= length_N - ring).nonzero()[:, 0]
    slot_M = slots_S[seq_ids_N[last_M]]
    state_LRC[slot_M, positions_N[last_M] % ring] = x_NC[last_M].detach()
