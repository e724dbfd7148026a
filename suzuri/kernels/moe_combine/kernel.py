"""The ordered fold over a token's slots; bit-equal to the reference: products and sums are rounded
one by one, in slot order.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _moe_combine(y, inverse, weights, out, D, y_stride, J: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = at < D
    total = tl.zeros((BD,), dtype=tl.float32)
    for slot in tl.static_range(J):
        row = tl.load(inverse + token * J + slot)
        weight = tl.load(weights + token * J + slot)
        values = tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
        # The first product stands alone: 0 + -0 would lose its sign.
        total = weight * values if slot == 0 else total + weight * values
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), mask=inside)


def moe_combine(
    y_MD: Tensor,
    inverse_M: Tensor,
    weights_NJ: Tensor,
    out_dtype: torch.dtype,
    block: int | None = None,
) -> Tensor:
    (n, slots), d = weights_NJ.shape, y_MD.shape[1]
    out_ND = y_MD.new_empty(n, d, dtype=out_dtype)
    if out_ND.numel() == 0:
        return out_ND
    y_MD = y_MD if y_MD.stride(1) == 1 else y_MD.contiguous()
    width = block or int(min(1024, max(16, triton.next_power_of_2(d))))
    _moe_combine[(n, triton.cdiv(d, width))](
        y_MD,
        inverse_M,
        weights_NJ.contiguous(),
        out_ND,
        d,
        y_MD.stride(0),
        J=slots,
        BD=width,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_ND
