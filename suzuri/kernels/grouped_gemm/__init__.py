"""One matmul per expert over rows sorted by expert."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.grouped_gemm import reference
from suzuri.kernels.swiglu import swiglu as swiglu_op


def grouped_gemm(
    x_MK: Tensor,
    weight_EFK: Tensor,
    offsets_E1: Tensor,
    *,
    out_dtype: torch.dtype,
    swiglu: bool = False,
    order_M: Tensor | None = None,
    num_slots: int = 1,
    num_shared: int = 0,
) -> Tensor:
    """y[m] = x[m] @ weight[e]^T for offsets[e] <= m < offsets[e + 1]; zeros from offsets[E] on.

    x_MK [M, K] sorted by expert (`moe_permute`), weight_EFK [E, F, K] of the same dtype, offsets_E1
    [E+1] int64 from 0 to at most M. Returns [M, F] in `out_dtype`: full K in fp32 (at least), one
    rounding, unweighted. A row's bits depend on the row and its expert alone. Gradients: x and
    weight (of offsets that end at M).

    With `swiglu` y is that of the op `swiglu` over the unrounded products, [M, F / 2], in its bits.
    With order_M [M] int64, x_NK [N, K] is not sorted yet: row order[m] // num_slots is taken for
    m; of these x has no gradient. `num_shared`: so many of the experts, the last ones, have every
    token; a kernel may order its work by that, and no bit depends on it.
    """
    if x_MK.shape[1] != weight_EFK.shape[2] or offsets_E1.shape[0] != weight_EFK.shape[0] + 1:
        raise ValueError(
            f"grouped_gemm: x {list(x_MK.shape)}, weight {list(weight_EFK.shape)}, "
            f"offsets {list(offsets_E1.shape)}"
        )
    if x_MK.dtype != weight_EFK.dtype:
        raise ValueError(f"grouped_gemm: x is {x_MK.dtype}, weight is {weight_EFK.dtype}")
    if swiglu and weight_EFK.shape[1] % 2:
        raise ValueError(f"grouped_gemm: {weight_EFK.shape[1]} rows of gate and up must be even")
    records = exact.records_gradient(x_MK, weight_EFK) and not dispatch.is_forced()
    uses_loops = dispatch.use_cpu(x_MK, weight_EFK)
    if records or uses_loops or dispatch.use_reference(x_MK):
        if order_M is not None:
            if exact.records_gradient(x_MK):
                raise ValueError("grouped_gemm: rows that are not sorted yet have no gradient")
            x_MK = x_MK.index_select(0, order_M // num_slots)  # exact: copies rows
        if swiglu:
            wide = exact.at_least_fp32(x_MK.dtype)
            gate_up_MF2 = grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype=wide)
            return swiglu_op(gate_up_MF2, out_dtype=out_dtype)
    if records:
        from suzuri.kernels.grouped_gemm import gradient

        return gradient.GroupedGemm.apply(x_MK, weight_EFK, offsets_E1, out_dtype)
    if uses_loops:
        from suzuri.kernels.grouped_gemm import cpu

        return cpu.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
    if dispatch.use_reference(x_MK):
        return reference.grouped_gemm(x_MK, weight_EFK, offsets_E1, out_dtype)
    if x_MK.device.type != "cuda" or x_MK.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("grouped_gemm", x_MK)
    from suzuri.kernels.grouped_gemm import kernel

    return kernel.grouped_gemm(
        x_MK,
        weight_EFK,
        offsets_E1,
        out_dtype,
        swiglu=swiglu,
        order_M=order_M,
        num_slots=num_slots,
        num_shared=num_shared,
    )
