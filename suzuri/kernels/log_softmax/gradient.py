"""Log-softmax with a gradient: g less the probabilities times the sum of the row's g."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels.log_softmax import log_softmax


class LogSoftmax(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        logprobs_NV = log_softmax(logits_NV)
        ctx.save_for_backward(logprobs_NV)
        ctx.dtype = logits_NV.dtype
        return logprobs_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logprobs_NV,) = ctx.saved_tensors
        (grad_NV,) = grads
        total_N1 = grad_NV.sum(-1, keepdim=True)
        return (grad_NV - torch.exp(logprobs_NV) * total_N1).to(ctx.dtype)
