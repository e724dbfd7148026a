"""Matrices in NVFP4: quantising to it, and the bf16 values that it stands for."""

import dataclasses

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.nvfp4 import reference

BLOCK = reference.BLOCK
"""Columns that share one block scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvfp4:
    """E matrices [N, K]: value = e2m1[code] * block scale * global scale, rounded once to bf16.

    codes uint8 [E, N, K/2], two per byte, the low four bits the even column, the top bit of four
    the sign; block_scales float8_e4m3fn [E, N, K/16], row by row; global_scales fp32 [E].
    """

    codes: Tensor
    block_scales: Tensor
    global_scales: Tensor


def quantize(weight_ENK: Tensor) -> Nvfp4:
    """The nearest NVFP4 matrices, each expert's by itself and each block of 16 columns by itself.

    weight_ENK [E, N, K] bf16 or fp32, finite, below 2^100, K a multiple of 16. The global scale is
    the smallest power of two, from 2^-100, that reaches the largest value (1 where all values are
    too small to keep); so every NVFP4 value is exact in bf16. A block scale is the e4m3 number of
    least squared error around amax / 6, the smallest such number. Rounding is to nearest, ties to
    even; zeros are positive. Quantising the dequantised result gives the same bytes again. The same
    bytes on every device. No gradients. Raises ValueError for K, and for a value that is not finite
    or too large.
    """
    if weight_ENK.dim() != 3 or weight_ENK.shape[-1] % BLOCK:
        shape = list(weight_ENK.shape)
        raise ValueError(f"nvfp4: shape {shape} must be [E, N, K], K a multiple of {BLOCK}")
    if weight_ENK.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"nvfp4: dtype {weight_ENK.dtype} must be bfloat16 or float32")
    if dispatch.use_reference(weight_ENK):
        return Nvfp4(**reference.quantize(weight_ENK.detach()))
    if weight_ENK.device.type != "cuda":
        raise dispatch.no_kernel("nvfp4.quantize", weight_ENK)
    # For converting checkpoints, not for a step: elementwise operations, fixed trees, and a host
    # that looks at the largest value of each matrix.
    return Nvfp4(**reference.quantize(weight_ENK.detach()))


def dequantize(weight: Nvfp4, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values [E, N, K] in `out_dtype`, rounded to bf16 first whatever that is.

    So a model is the same in every dtype, and equal to the one whose checkpoint was stored as the
    bf16 values. e2m1 * block scale is exact in fp32; its product with the global scale is rounded
    to fp32, then to bf16. No gradients.
    """
    if dispatch.use_reference(weight.codes):
        values_ENK = reference.dequantize(weight.codes, weight.block_scales, weight.global_scales)
        return values_ENK.to(out_dtype)
    if weight.codes.device.type != "cuda":
        raise dispatch.no_kernel("nvfp4.dequantize", weight.codes)
    from suzuri.kernels.nvfp4 import kernel

    return kernel.dequantize(weight.codes, weight.block_scales, weight.global_scales, out_dtype)
