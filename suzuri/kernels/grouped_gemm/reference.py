"""A loop over the experts that have rows."""

from itertools import pairwise

import torch
from torch import Tensor

from suzuri.kernels import exact


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
) -> Tensor:
    offsets = offsets_E1.tolist()
    parts = [
        exact.accumulate(x_MK[begin:end], weight_EFK[expert]).to(out_dtype)
        for expert, (begin, end) in enumerate(pairwise(offsets))
        if begin < end
    ]
    return torch.cat(parts) if parts else x_MK.new_zeros(0, weight_EFK.shape[1], dtype=out_dtype)
