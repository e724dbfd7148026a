"""As reference.py, on arrays."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import array, tensor, tree


@np.errstate(all="ignore")
def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    wide_ND = array(exact.widen(x_ND))
    mean_N = tree(wide_ND * wide_ND) / x_ND.shape[-1]
    mean_N += eps
    scale_N = array(torch.rsqrt(tensor(mean_N)))
    y_ND = wide_ND * scale_N[..., None]
    y_ND *= array(weight_D.to(exact.at_least_fp32(x_ND.dtype)))
    return tensor(y_ND).to(out_dtype)
