"""The parts, one after the other."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.short_conv import short_conv


def attention_prologue(
    qkvr_NX: Tensor,
    conv_CK: Tensor,
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    sequences: Sequence[Tensor],
    heads: int,
    kv_heads: int,
    eps: float,
    scaling: tuple[float, float, int] | None,
    state: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    channels = q_norm_C.shape[0]
    widths = (heads * channels, 2 * kv_heads * channels)
    q_NX, kv_NX, r_NX = qkvr_NX.split((*widths, qkvr_NX.shape[1] - widths[0] - widths[1]), -1)
    memory = {}
    if state is not None:
        memory = {"state_LRC": state.conv_LRC, "slots_S": state.conv_slots_S}
    kv_NC = short_conv(kv_NX, conv_CK, *sequences, **memory)
    kv_N2UC = kv_NC.reshape(-1, 2, kv_heads, channels)
    q_NHC = rms_norm(q_NX.reshape(-1, heads, channels), q_norm_C, eps)
    k_NUC, v_NUC = rms_norm(kv_N2UC[:, 0], k_norm_C, eps), kv_N2UC[:, 1]
    r_NHB = r_NX.unflatten(1, (heads, -1))
    if scaling is not None:
        n_floor, alpha, offset = scaling
        positions_N = sequences[0] + offset if offset else sequences[0]
        q_NHC = log_scaling(q_NHC, positions_N, n_floor, alpha)
        r_NHB = log_scaling(r_NHB, positions_N, n_floor, alpha)
    if state is None:
        return q_NHC, r_NHB, k_NUC, v_NUC
    kv_write(k_NUC, v_NUC, state.k_pages_PTUC, state.v_pages_PTUC, state.page_slots_N)
    return q_NHC, r_NHB, None, None
