"""Routed experts that stay in NVFP4: what a quantised layer holds instead of a parameter."""

import torch
from torch import Tensor, nn

from suzuri.kernels import nvfp4
from suzuri.kernels.nvfp4 import BLOCK, Nvfp4


class Nvfp4Experts(nn.Module):
    """E matrices [N, K] in NVFP4, frozen; their values are bf16 numbers whatever the model's dtype.

    `input_amax` [1] is the largest input that the quantising calibration saw, 0 when there was
    none. Nothing here computes with it: inputs stay in the model's dtype.
    """

    codes: Tensor
    block_scales: Tensor
    global_scales: Tensor
    input_amax: Tensor

    def __init__(self, num_experts: int, rows: int, columns: int) -> None:
        super().__init__()
        shape = (num_experts, rows)
        codes = torch.empty(*shape, columns // 2, dtype=torch.uint8)
        scales = torch.empty(*shape, columns // BLOCK, dtype=torch.float8_e4m3fn)
        self.register_buffer("codes", codes)
        self.register_buffer("block_scales", scales)
        self.register_buffer("global_scales", torch.empty(num_experts, dtype=torch.float32))
        self.register_buffer("input_amax", torch.zeros(1, dtype=torch.bfloat16))

    def matrices(self, first: int = 0, stop: int | None = None) -> Nvfp4:
        """Experts first..stop-1 (all by default), sharing memory."""
        return Nvfp4(
            codes=self.codes[first:stop],
            block_scales=self.block_scales[first:stop],
            global_scales=self.global_scales[first:stop],
        )

    def values(self, dtype: torch.dtype) -> Tensor:
        """All matrices [E, N, K], dequantised."""
        return nvfp4.dequantize(self.matrices(), out_dtype=dtype)
