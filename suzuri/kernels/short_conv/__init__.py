"""Depthwise causal convolution with its own residual over packed sequences."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.short_conv import reference


def short_conv(
    x_NC: Tensor,
    weight_CK: Tensor,
    positions_N: Tensor,
    seq_ids_N: Tensor,
    seq_starts_S1: Tensor,
    *,
    state_LRC: Tensor | None = None,
    slots_S: Tensor | None = None,
) -> Tensor:
    """y[n] = x[n] + sum_d weight[:, K-1-d] * x[n-d], d = K-1..0, inside one sequence only.

    x_NC [N, C] packed rows; weight_CK [C, K], tap K-1 is the current token; positions_N [N]
    absolute position in the sequence; seq_ids_N [N] its index; seq_starts_S1 [S+1] first row of
    each. No activation, no bias. Taps and residual in fp32 (at least): oldest tap first, residual
    last, one rounding to the dtype of x. Inputs before position 0 are zero.

    With `state_LRC` [slots, R, C] (dtype of x), a ring of inputs per sequence in which the input at
    position p lives in row p mod R, rows before the batch come from slot `slots_S` [S] and the
    batch's last R inputs of each sequence are written there **in place**. R >= K - 1; R >= K - 1 +
    w makes undoing the last w tokens free: continue from the earlier position. Gradients (without
    state only): x and weight. Source: docs/architecture.md 2.3.
    """
    taps = weight_CK.shape[1]
    if weight_CK.shape[0] != x_NC.shape[1]:
        raise ValueError(f"short_conv: x {list(x_NC.shape)}, weight {list(weight_CK.shape)}")
    if state_LRC is not None and state_LRC.shape[1] < taps - 1:
        raise ValueError(f"short_conv: a state ring of {state_LRC.shape[1]} rows for {taps} taps")
    if (state_LRC is None) != (slots_S is None):
        raise ValueError("short_conv: state_LRC and slots_S go together")
    if state_LRC is None and exact.records_gradient(x_NC, weight_CK) and not dispatch.is_forced():
        from suzuri.kernels.short_conv import gradient

        return gradient.ShortConv.apply(x_NC, weight_CK, positions_N, seq_ids_N, seq_starts_S1)
    if taps and dispatch.use_cpu(x_NC, weight_CK):
        from suzuri.kernels.short_conv import cpu

        if state_LRC is None or slots_S is None:
            return cpu.short_conv_packed(x_NC, weight_CK, seq_ids_N, seq_starts_S1)
        if taps > 1 and state_LRC.is_contiguous():
            return cpu.short_conv(
                x_NC, weight_CK, positions_N, seq_ids_N, seq_starts_S1, state_LRC, slots_S
            )
    if dispatch.use_reference(x_NC):
        return reference.short_conv(
            x_NC, weight_CK, positions_N, seq_ids_N, seq_starts_S1, state_LRC, slots_S
        )
    if x_NC.device.type != "cuda":
        raise dispatch.no_kernel("short_conv", x_NC)
    if exact.records_gradient(x_NC, weight_CK):
        raise NotImplementedError(
            "short_conv: no gradient with state on a GPU; call it under torch.inference_mode()"
        )
    from suzuri.kernels.short_conv import kernel

    return kernel.short_conv(
        x_NC, weight_CK, positions_N, seq_ids_N, seq_starts_S1, state_LRC, slots_S
    )
