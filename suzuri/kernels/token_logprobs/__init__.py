"""Log-probs of given next tokens straight from hidden states, without the [N, V] logits."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.token_logprobs import reference


def token_logprobs(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    *,
    scale: float,
    temperature_N: Tensor | None = None,
) -> Tensor:
    """log_softmax(h @ unembed^T * scale / temperature)[target] per row, in fp32 (at least).

    h_ND [N, D] after the final norm, unembed_VD [V, D] real vocabulary rows only (no padding), one
    dtype; targets_N [N] int64 in [0, V) (IndexError otherwise, on a GPU NaN, as raising would wait
    for it: leave out rows that have no target); scale = 1 / mup; temperature_N [N] > 0 or None
    for the raw log-prob. Returns [N]. Same bits as `log_softmax` of the whole logits: the same
    calls, chunk by chunk of 2048 ids. Gradients: h and unembed.
    """
    if h_ND.dtype != unembed_VD.dtype:
        raise ValueError(f"token_logprobs: h is {h_ND.dtype}, unembed is {unembed_VD.dtype}")
    if dispatch.use_reference(h_ND):
        return reference.token_logprobs(h_ND, unembed_VD, targets_N, scale, temperature_N)
    if h_ND.device.type != "cuda" or h_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("token_logprobs", h_ND)
    if exact.records_gradient(h_ND, unembed_VD):
        raise NotImplementedError(
            "token_logprobs: no gradient on a GPU yet; call it under torch.inference_mode()"
        )
    from suzuri.kernels.token_logprobs import kernel

    return kernel.token_logprobs(h_ND, unembed_VD, targets_N, scale, temperature_N)
