"""The grouped product with a gradient, and the two products that the backward of experts needs.

On a CPU by loops (cpu.py), for fp64 a library call per expert that has rows; on a GPU our kernels,
which find the rows of an expert from the offsets there: the host never waits for them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.grouped_gemm import grouped_gemm


class GroupedGemm(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        kept = x_MK if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight_EFK, offsets_E1)
        return grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_MK, weight_EFK, offsets_E1 = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = of_inputs(grads[0], weight_EFK, offsets_E1).to(weight_EFK.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = of_weights(grads[0], x_MK, offsets_E1)
        return grad_x, grad_weight, None, None


def _runs(offsets_E1: Tensor) -> Iterator[tuple[int, slice]]:
    """Every expert and its rows."""
    return ((e, slice(*ends)) for e, ends in enumerate(pairwise(offsets_E1.tolist())))


def of_inputs(grad_MF: Tensor, weight_EFK: Tensor, offsets_E1: Tensor) -> Tensor:
    """grad[m] @ weight[e] for the rows m of expert e, [M, K] in at least fp32.

    On a GPU the gradient is first rounded to the dtype of the weight: the matrix instructions
    multiply bf16, and add in fp32.
    """
    wide = exact.at_least_fp32(weight_EFK.dtype)
    if grad_MF.device.type != "cpu":
        from suzuri.kernels.grouped_gemm import kernel

        return kernel.of_inputs(grad_MF.to(weight_EFK.dtype), weight_EFK, offsets_E1)
    if dispatch.use_cpu(weight_EFK, grad_MF):
        from suzuri.kernels.grouped_gemm import cpu

        return cpu.of_inputs(grad_MF, weight_EFK, offsets_E1)
    grad_MF, weight_EFK = grad_MF.to(wide), weight_EFK.to(wide)
    grad_MK = grad_MF.new_empty(grad_MF.shape[0], weight_EFK.shape[2])
    for e, rows in _runs(offsets_E1):
        if rows.stop > rows.start:
            torch.mm(grad_MF[rows], weight_EFK[e], out=grad_MK[rows])
    return grad_MK


def of_weights(grad_MF: Tensor, x_MK: Tensor, offsets_E1: Tensor) -> Tensor:
    """grad^T @ x over the rows of each expert, [E, F, K] in at least fp32; zeros where an expert
    has no rows. Rounding on a GPU as in `of_inputs`."""
    wide = exact.at_least_fp32(x_MK.dtype)
    if x_MK.device.type != "cpu":
        from suzuri.kernels.grouped_gemm import kernel

        return kernel.of_weights(grad_MF.to(x_MK.dtype), x_MK, offsets_E1)
    if dispatch.use_cpu(x_MK, grad_MF):
        from suzuri.kernels.grouped_gemm import cpu

        return cpu.of_weights(grad_MF, x_MK, offsets_E1)
    grad_MF, x_MK = grad_MF.to(wide), x_MK.to(wide)
    shape = (offsets_E1.shape[0] - 1, grad_MF.shape[1], x_MK.shape[1])
    grad_EFK = grad_MF.new_empty(shape)
    for e, rows in _runs(offsets_E1):
        if rows.stop > rows.start:
            torch.mm(grad_MF[rows].T, x_MK[rows], out=grad_EFK[e])
        else:
            grad_EFK[e].zero_()
    return grad_EFK
