"""Select and sum in one launch: a program adds all bins of one row, for a run of columns."""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.triton_math import tree_sum

ELEMENTS = 8192
"""Bins (rounded up to a power of two) times columns of one program."""


@triton.jit
def _kernel(
    ids,
    weight,
    out,
    num_rows_of_table,
    row_stride,
    column_stride,
    NUM_BINS: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    index = tl.load(ids + row * NUM_BINS + bins, mask=bins < NUM_BINS, other=0)
    is_found = (index >= 0) & (index < num_rows_of_table)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    # [columns, bins]: the tree runs over the last dim. Bins beyond the last one add 0.
    at = column[:, None] * column_stride + (index * row_stride)[None, :]
    is_added = inside[:, None] & (bins < NUM_BINS)[None, :]
    value = tl.load(weight + at, mask=is_added & is_found[None, :], other=0.0).to(tl.float32)
    value = tl.where(is_added & (is_found == 0)[None, :], float("nan"), value)
    tl.store(out + row * WIDTH + column, tree_sum(value), mask=inside)


def embedding_sum(
    ids_NB: Tensor, weight_VD: Tensor, *, elements: int = ELEMENTS, num_warps: int = 4
) -> Tensor:
    """An id beyond the table makes its row NaN, as in embedding."""
    if weight_VD.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"embedding_sum of {weight_VD.dtype}", weight_VD)
    (num_rows, num_bins), (table_rows, width) = ids_NB.shape, weight_VD.shape
    bins = triton.next_power_of_2(max(num_bins, 1))
    if bins > exact.FOLD:
        raise dispatch.no_kernel(f"embedding_sum of {num_bins} bins", weight_VD)
    out_ND = torch.empty((num_rows, width), dtype=torch.float32, device=weight_VD.device)
    if not out_ND.numel():
        return out_ND
    columns = min(triton.next_power_of_2(width), max(1, elements // bins))
    _kernel[(num_rows, triton.cdiv(width, columns))](
        ids_NB.contiguous(),
        weight_VD,
        out_ND,
        table_rows,
        *weight_VD.stride(),
        NUM_BINS=num_bins,
        BINS=bins,
        WIDTH=width,
        COLUMNS=columns,
        num_warps=num_warps,
    )
    return out_ND
