"""As reference.py, on arrays."""

import numpy as np
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, tensor


def moe_permute(
    x_ND: Tensor, experts_NJ: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts_M = array(experts_NJ).reshape(-1)
    order_M = experts_M.argsort(kind="stable")  # exact: a stable sort
    inverse_M = np.empty_like(order_M)
    inverse_M[order_M] = np.arange(len(order_M))
    offsets_E1 = experts_M[order_M].searchsorted(np.arange(num_experts + 1))
    rows_MD = exact.take_rows(x_ND, tensor(order_M // experts_NJ.shape[1]))
    return rows_MD, tensor(order_M), tensor(inverse_M), tensor(offsets_E1)
