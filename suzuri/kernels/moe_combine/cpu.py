"""As reference.py, all products at once."""

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels.arrays import array, tensor


@np.errstate(all="ignore")
def moe_combine(
    y_MD: Tensor, inverse_M: Tensor, weights_NJ: Tensor, out_dtype: torch.dtype
) -> Tensor:
    slots_MD = array(y_MD.to(weights_NJ.dtype)).take(array(inverse_M), axis=0)
    slots_NJD = slots_MD.reshape(*weights_NJ.shape, y_MD.shape[1])
    slots_NJD *= array(weights_NJ)[..., None]
    out_ND = slots_NJD[:, 0]
    for slot in range(1, slots_NJD.shape[1]):
        out_ND = out_ND + slots_NJD[:, slot]
    return tensor(out_ND).to(out_dtype)
