"""SwiGLU written out."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def swiglu(gate_up_NF2: Tensor, out_dtype: torch.dtype) -> Tensor:
    wide = exact.widen(gate_up_NF2)
    return (exact.silu(wide[..., 0::2]) * wide[..., 1::2]).to(out_dtype)
