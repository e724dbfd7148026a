"""The parts, one after the other."""

from torch import Tensor

from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.short_conv import short_conv


def residual_norm(
    y_ND: Tensor,
    h_ND: Tensor,
    conv_DK: Tensor,
    norm_D: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    eps: float,
    state_LRC: Tensor | None,
    slots_S: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sequences = (positions_N, seq_ids_N, seq_starts_S1)
    # A short conv already contains its own residual; the stream's is added on top.
    h_ND = h_ND + short_conv(y_ND, conv_DK, *sequences, state_LRC=state_LRC, slots_S=slots_S)
    return h_ND, rms_norm(h_ND, norm_D, eps)
