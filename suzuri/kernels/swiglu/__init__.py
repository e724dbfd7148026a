"""silu(gate) * up on interleaved gate/up rows."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.swiglu import reference


def swiglu(gate_up_NF2: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """hidden = g / (1 + exp(-g)) * u with g = even, u = odd columns, in fp32, one rounding.

    gate_up_NF2 [N, 2F], columns interleaved g0, u0, g1, u1, ... as in the released checkpoints,
    normally the unrounded fp32 accumulators of the projection. Returns [N, F] in `out_dtype`.
    Gradient: gate_up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if gate_up_NF2.shape[-1] % 2:
        raise ValueError(f"swiglu: last dim of {list(gate_up_NF2.shape)} must be even")
    if dispatch.use_reference(gate_up_NF2):
        return reference.swiglu(gate_up_NF2, out_dtype)
    raise dispatch.no_kernel("swiglu", gate_up_NF2)
