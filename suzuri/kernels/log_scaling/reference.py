"""tau by its formula."""

import torch
from torch import Tensor

from suzuri.kernels import exact


def log_scaling(x_NHC: Tensor, positions_N: Tensor, n_floor: float, alpha: float) -> Tensor:
    wide_NHC = exact.widen(x_NHC)
    ratio_N = (positions_N + 1).to(wide_NHC.dtype) / n_floor
    tau_N = 1 + alpha * torch.log(ratio_N.clamp(min=1))
    return (wide_NHC * tau_N[:, None, None]).to(x_NHC.dtype)
