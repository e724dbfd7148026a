"""GELU by its formula: the library's own differs between vector lanes and tails."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def gelu(x: Tensor) -> Tensor:
    wide = exact.widen(x)
    return (wide * (1 + torch.erf(wide * 0.5**0.5)) * 0.5).to(x.dtype)
