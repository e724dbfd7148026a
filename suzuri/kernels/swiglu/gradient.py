"""The gradient of SwiGLU. Saved: gate_up; the sigmoid is computed again.

`_backward` is the formula, for fp64 and where nothing else runs; cpu.py and kernel.py have it too.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.swiglu import swiglu


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_NF2: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate_up_NF2)
        return swiglu(gate_up_NF2, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NF: Tensor) -> tuple[Tensor, None]:
        (gate_up_NF2,) = ctx.saved_tensors
        if dispatch.use_cpu(gate_up_NF2):
            from suzuri.kernels.swiglu import cpu

            return cpu.swiglu_backward(gate_up_NF2, grad_NF), None
        if not dispatch.use_reference(gate_up_NF2) and gate_up_NF2.dtype in dispatch.LOOP_DTYPES:
            from suzuri.kernels.swiglu import kernel

            return kernel.swiglu_backward(gate_up_NF2, grad_NF), None
        return _backward(gate_up_NF2, grad_NF), None


def _backward(gate_up_NF2: Tensor, grad_NF: Tensor) -> Tensor:
    """d(silu(g) * u): s * (1 + g * (1 - s)) * u for g, s * g for u, s = sigmoid(g)."""
    wide = exact.widen(gate_up_NF2)
    grad_NF = grad_NF.to(wide.dtype)
    gate_NF, up_NF = wide[..., 0::2], wide[..., 1::2]
    sigmoid_NF = gate_NF.sigmoid()
    grads = [
        grad_NF * up_NF * sigmoid_NF * (1 + gate_NF * (1 - sigmoid_NF)),
        grad_NF * gate_NF * sigmoid_NF,
    ]
    return torch.stack(grads, -1).flatten(-2).to(gate_up_NF2.dtype)
