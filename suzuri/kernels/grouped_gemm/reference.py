"""A loop over the experts that have rows."""

from itertools import pairwise

import torch
from torch import Tensor

from suzuri.kernels import exact


def grouped_gemm(
    x_MK: Tensor, weight_EFK: Tensor, offsets_E1: Tensor, out_dtype: torch.dtype
) -> Tensor:
    # unbind and split, not a slice per expert: the backward of each slice would be all of them.
    counts = [end - begin for begin, end in pairwise([*offsets_E1.tolist(), len(x_MK)])]
    pairs = zip(x_MK.split(counts), weight_EFK.unbind(), strict=False)
    parts = [exact.accumulate(x, weight).to(out_dtype) for x, weight in pairs if len(x)]
    if counts[-1] or not parts:
        parts.append(x_MK.new_zeros(counts[-1], weight_EFK.shape[1], dtype=out_dtype))
    return torch.cat(parts)
