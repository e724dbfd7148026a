"""silu(gate) * up on interleaved gate/up rows."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.swiglu import reference


def swiglu(gate_up_NF2: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """hidden = g / (1 + exp(-g)) * u with g = even, u = odd columns, in fp32, one rounding.

    gate_up_NF2 [N, 2F], columns interleaved g0, u0, g1, u1, ... as in the released checkpoints,
    normally the unrounded fp32 accumulators of the projection. Returns [N, F] in `out_dtype`.
    Gradient: gate_up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if gate_up_NF2.shape[-1] % 2:
        raise ValueError(f"swiglu: last dim of {list(gate_up_NF2.shape)} must be even")
    if exact.records_gradient(gate_up_NF2) and not dispatch.is_forced():
        from suzuri.kernels.swiglu import gradient

        return gradient.SwiGLU.apply(gate_up_NF2, out_dtype)
    if dispatch.use_cpu(gate_up_NF2):
        from suzuri.kernels.swiglu import cpu

        return cpu.swiglu(gate_up_NF2, out_dtype)
    if dispatch.use_reference(gate_up_NF2):
        return reference.swiglu(gate_up_NF2, out_dtype)
    if gate_up_NF2.device.type != "cuda" or gate_up_NF2.dtype not in (
        torch.bfloat16,
        torch.float32,
    ):
        raise dispatch.no_kernel("swiglu", gate_up_NF2)
    from suzuri.kernels.swiglu import kernel

    return kernel.swiglu(gate_up_NF2, out_dtype)
