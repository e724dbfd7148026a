"""tau by its formula."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.kept import kept


def log_scaling(x_NHC: Tensor, positions_N: Tensor, n_floor: float, alpha: float) -> Tensor:
    wide_NHC = exact.widen(x_NHC)
    tau_N = kept(tau, positions_N, params=(n_floor, alpha, wide_NHC.dtype))
    return (wide_NHC * tau_N[:, None, None]).to(x_NHC.dtype)


def tau(
    positions_N: Tensor, n_floor: float, alpha: float, dtype: torch.dtype, offset: int = 0
) -> Tensor:
    """The factor of each position, [N]."""
    ratio_N = (positions_N + (1 + offset)).to(dtype) / n_floor
    return 1 + alpha * torch.log(ratio_N.clamp(min=1))
