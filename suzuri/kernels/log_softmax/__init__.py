"""Log-softmax over the vocabulary in fixed chunks."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.log_softmax import reference


def log_softmax(logits_NV: Tensor) -> Tensor:
    """log_softmax over the last dim, in the (at least fp32) dtype of the logits.

    logits_NV [N, V], real vocabulary rows only; -inf marks a masked id (its log-prob is -inf), and
    at least one id per row must be finite. Chunks of 2048 ids: per chunk the max and a fixed-tree
    sum of exp(x - max), folded in chunk order, so that ranks may own whole chunks and
    `token_logprobs` gives the same bits without the logits. Gradient: logits.
    """
    if exact.records_gradient(logits_NV) and not dispatch.is_forced():
        from suzuri.kernels.log_softmax import gradient

        return gradient.LogSoftmax.apply(logits_NV)
    if dispatch.use_cpu(logits_NV):
        from suzuri.kernels.log_softmax import cpu

        return cpu.log_softmax(logits_NV)
    if dispatch.use_reference(logits_NV):
        return reference.log_softmax(logits_NV)
    if logits_NV.device.type != "cuda" or logits_NV.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("log_softmax", logits_NV)
    from suzuri.kernels.log_softmax import kernel

    return kernel.log_softmax(logits_NV)
