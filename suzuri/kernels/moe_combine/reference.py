"""An ordered fold over the slots."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.moe_permute.reference import PermuteRows


def moe_combine(
    y_MD: Tensor, order_M: Tensor, inverse_M: Tensor, weights_NJ: Tensor, out_dtype: torch.dtype
) -> Tensor:
    weights_NJ = exact.widen(weights_NJ)
    slots_MD: Tensor = PermuteRows.apply(y_MD, inverse_M, order_M)
    slots_NJD = slots_MD.unflatten(0, weights_NJ.shape).to(weights_NJ.dtype)
    out_ND = weights_NJ[:, 0, None] * slots_NJD[:, 0]
    for slot in range(1, weights_NJ.shape[1]):
        out_ND = out_ND + weights_NJ[:, slot, None] * slots_NJD[:, slot]
    return out_ND.to(out_dtype)
