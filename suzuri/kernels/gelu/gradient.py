"""The gradient of GELU. Saved: x."""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import exact
from suzuri.kernels.gelu import gelu


class GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        """grad * (Phi(x) + x * phi(x)), the normal distribution and its density."""
        (x,) = ctx.saved_tensors
        wide = exact.widen(x)
        normal = torch.erf(wide * 0.5**0.5).add_(1).mul_(0.5)
        density = torch.exp(wide * wide * -0.5).mul_(1 / math.sqrt(2 * math.pi))
        return normal.addcmul_(wide, density).mul_(grad.to(wide.dtype)).to(x.dtype)
