"""What lies between two parts of a layer: short convolution, residual, and the next norm."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.residual_norm import reference


def residual_norm(
    y_ND: Tensor,
    h_ND: Tensor,
    conv_DK: Tensor,
    norm_D: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    *,
    eps: float,
    state_LRC: Tensor | None = None,
    slots_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(h + short_conv(y), the norm of that), both [N, D] in the dtype of h.

    y_ND [N, D]: what attention or an MLP gave; h_ND [N, D]: the residual stream, same dtype;
    conv_DK [D, taps]; norm_D [D]: weight of the norm that follows; the rest as in `short_conv`,
    which writes the ring `state_LRC` **in place**. By definition the composition of `short_conv`,
    a sum and `rms_norm`, with the roundings of each. Gradients (without state): y, h and weights.
    """
    if y_ND.shape != h_ND.shape or y_ND.dtype != h_ND.dtype:
        raise ValueError(
            f"residual_norm: {list(y_ND.shape)} {y_ND.dtype} added to {list(h_ND.shape)} "
            f"{h_ND.dtype}"
        )
    sequences = (positions_N, seq_ids_N, seq_starts_S1)
    given = (y_ND, h_ND, conv_DK, norm_D, *sequences, eps, state_LRC, slots_S)
    is_recorded = exact.records_gradient(y_ND, h_ND, conv_DK, norm_D)
    if is_recorded or dispatch.use_reference(y_ND) or y_ND.device.type != "cuda":
        return reference.residual_norm(*given)
    from suzuri.kernels.residual_norm import kernel

    if not kernel.covers(*given[:4]):
        return reference.residual_norm(*given)
    return kernel.residual_norm(*given)
