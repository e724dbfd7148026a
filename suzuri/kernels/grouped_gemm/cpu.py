"""As reference.py, in one call for all experts."""

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, empty, tensor
from suzuri.kernels.compiled import spread
from suzuri.kernels.loops import grouped_products


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
) -> Tensor:
    experts, width, k = weight_EFK.shape
    x, w, offsets = (
        array(exact.widen(x_MK).contiguous()),
        exact.transposed(weight_EFK),
        array(offsets_E1),
    )
    y = empty(x.shape[0], width)
    spread(y.size * k, experts, lambda first, last: grouped_products(x, w, offsets, y, first, last))
    return tensor(y, out_dtype)
