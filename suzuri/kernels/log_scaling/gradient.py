"""The gradient of log_scaling is log_scaling. Saved: the positions."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels.log_scaling import log_scaling


class LogScaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NHC: Tensor, positions_N: Tensor, n_floor: float, alpha: float) -> Tensor:
        ctx.save_for_backward(positions_N)
        ctx.n_floor, ctx.alpha = n_floor, alpha
        return log_scaling(x_NHC, positions_N, n_floor, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NHC: Tensor) -> tuple[Tensor, None, None, None]:
        (positions_N,) = ctx.saved_tensors
        return log_scaling(grad_NHC, positions_N, ctx.n_floor, ctx.alpha), None, None, None
