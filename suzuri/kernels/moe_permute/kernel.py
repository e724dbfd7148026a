"""Stable sort by expert and the gather of rows, without a word from the GPU to the host.

A slot's place is the number of slots with a smaller expert, plus those of its own before it. For
few slots each program counts that itself and copies its rows at once. For more, one launch counts
the experts of every block of slots, the next adds up the blocks before its own, a third copies; for
very many the library's stable sort (integers: one result) gives the places.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024
"""Slots up to which every program counts for itself."""
IN_BLOCKS = 1 << 17
"""Slots up to which the blocks are added up."""
BLOCK = 512
"""Slots of such a block."""
SLOTS = 16
"""Slots per program that copies."""
SCAN = 256
"""Slots compared at a time."""


@triton.jit(do_not_specialize=["M"])
def _permute(
    x,
    experts,
    order,
    inverse,
    offsets,
    rows,
    D,
    x_stride,
    E,
    M,
    J: tl.constexpr,
    SCANS: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """Programs (slot block, column block). With SCANS (of BM slots each, all of M) places are
    counted, and the programs after the slot blocks fill offsets; without, they are in inverse."""
    block = tl.program_id(0)
    num_blocks = tl.cdiv(M, BS)
    mine = block * BS + tl.arange(0, BS)
    is_slot = mine < M
    if SCANS:
        if block < num_blocks:
            expert = tl.load(experts + mine, mask=is_slot, other=0)
        else:  # the first slot of an expert comes after all smaller ones and none of its own
            mine = (block - num_blocks) * BS + tl.arange(0, BS)
            expert = mine.to(tl.int64)
        before = tl.zeros((BS,), dtype=tl.int32)
        for scan in range(SCANS):
            other = scan * BM + tl.arange(0, BM)
            their = tl.load(experts + other, mask=other < M, other=9223372036854775807)
            smaller = their[None, :] < expert[:, None]
            own = (their[None, :] == expert[:, None]) & (other[None, :] < mine[:, None])
            own = own & (block < num_blocks)
            before += tl.sum((smaller | own).to(tl.int32), axis=1)
        place = before.to(tl.int64)
        if tl.program_id(1) == 0:
            if block < num_blocks:
                tl.store(order + place, mine.to(tl.int64), mask=is_slot)
                tl.store(inverse + mine, place, mask=is_slot)
            else:
                tl.store(offsets + mine, place, mask=mine <= E)
    else:
        place = tl.load(inverse + mine, mask=is_slot, other=0)
    if block < num_blocks:
        at = tl.program_id(1) * BD + tl.arange(0, BD)
        both = is_slot[:, None] & (at < D)[None, :]
        token = (mine // J).to(tl.int64)
        values = tl.load(x + token[:, None] * x_stride + at[None, :], mask=both)
        tl.store(rows + place[:, None] * D + at[None, :], values, mask=both)


@triton.jit(do_not_specialize=["M"])
def _count(experts, counts, M, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """How often each expert is in a block of slots; slots behind the end count for bin E."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < M, other=E).to(tl.int32)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["M", "num_blocks"])
def _place(
    experts,
    counts,
    order,
    inverse,
    offsets,
    M,
    E,
    num_blocks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Places of a block of slots, from the counts of all blocks."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros((BINS,), dtype=tl.int32)
    total = tl.zeros((BINS,), dtype=tl.int32)
    for chunk in range(CHUNKS):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        at = counts + other[:, None] * BINS + bins[None, :]
        count = tl.load(at, mask=(other < num_blocks)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < block)[:, None], count, 0), axis=0)
    first = tl.cumsum(total, axis=0) - total
    if block == 0:
        tl.store(offsets + bins, first.to(tl.int64), mask=bins <= E)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    is_slot = slot < M
    expert = tl.load(experts + slot, mask=is_slot, other=E).to(tl.int32)
    place = tl.gather(first + before, expert, axis=0)
    for step in range(BLOCK // STEP):
        other = block * BLOCK + step * STEP + tl.arange(0, STEP)
        their = tl.load(experts + other, mask=other < M, other=E).to(tl.int32)
        own = (their[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
        place += tl.sum(own.to(tl.int32), axis=1)
    tl.store(order + place, slot.to(tl.int64), mask=is_slot)
    tl.store(inverse + slot, place.to(tl.int64), mask=is_slot)


def _places_by_blocks(experts_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offsets)."""
    m = experts_M.shape[0]
    blocks, bins = -(-m // BLOCK), triton.next_power_of_2(num_experts + 1)
    counts = experts_M.new_empty(blocks, int(bins), dtype=torch.int32)
    order_M, inverse_M = torch.empty_like(experts_M), torch.empty_like(experts_M)
    offsets_E1 = experts_M.new_empty(num_experts + 1)
    _count[(blocks,)](experts_M, counts, m, num_experts, BLOCK=BLOCK, BINS=bins, num_warps=4)
    _place[(blocks,)](
        experts_M,
        counts,
        order_M,
        inverse_M,
        offsets_E1,
        m,
        num_experts,
        blocks,
        # A power of two: few kernels to compile.
        CHUNKS=triton.next_power_of_2(-(-blocks // 16)),
        CHUNK=16,
        BLOCK=BLOCK,
        BINS=bins,
        STEP=32,
        num_warps=8,
    )
    return order_M, inverse_M, offsets_E1


def _places_by_sort(experts_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sorted_M, order_M = torch.sort(experts_M, stable=True)
    slots_M = torch.arange(experts_M.shape[0], device=experts_M.device)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, slots_M)
    ids_E1 = torch.arange(num_experts + 1, device=experts_M.device)
    return order_M, inverse_M, torch.searchsorted(sorted_M, ids_E1)


def moe_permute(
    x_ND: Tensor,
    experts_NJ: Tensor,
    num_experts: int,
    at_once: int = AT_ONCE,
    in_blocks: int = IN_BLOCKS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (_, slots), d = experts_NJ.shape, x_ND.shape[1]
    experts_M = experts_NJ.reshape(-1).contiguous()
    m = experts_M.shape[0]
    counts = 0 < m <= at_once
    if counts:
        order_M, inverse_M = torch.empty_like(experts_M), torch.empty_like(experts_M)
        offsets_E1 = experts_M.new_empty(num_experts + 1)
    elif 0 < m <= in_blocks:
        order_M, inverse_M, offsets_E1 = _places_by_blocks(experts_M, num_experts)
    else:
        order_M, inverse_M, offsets_E1 = _places_by_sort(experts_M, num_experts)
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    rows_MD = x_ND.new_empty(m, d)
    if m:
        block = min(512, max(16, triton.next_power_of_2(d)))
        blocks = triton.cdiv(m, SLOTS) + (triton.cdiv(num_experts + 1, SLOTS) if counts else 0)
        _permute[(blocks, triton.cdiv(d, block))](
            x_ND,
            experts_M,
            order_M,
            inverse_M,
            offsets_E1,
            rows_MD,
            d,
            x_ND.stride(0),
            num_experts,
            m,
            J=slots,
            # A power of two: few kernels to compile.
            SCANS=triton.next_power_of_2(triton.cdiv(m, SCAN)) if counts else 0,
            BS=SLOTS,
            BM=SCAN,
            BD=block,
            num_warps=4,
        )
    return rows_MD, order_M, inverse_M, offsets_E1
