"""Stable sort by expert and the gather of rows, without a word from the GPU to the host.

A slot's place is the number of slots with a smaller expert, plus those of its own before it. For
few slots each program counts that itself and copies its rows at once. For more, one launch counts
the experts of every block of slots, the next adds up the blocks before its own, a third copies; for
very many the library's stable sort (integers: one result) gives the places.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.moe_permute.reference import all_slots

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


@triton.jit
def _expert_of(
    experts,
    num_rows,
    slot,
    is_slot,
    E,
    K: tl.constexpr,
    J: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """int64 expert of slots: those chosen by the token, then the last ones of E, which all take; E
    for the slots of padding."""
    token, j = slot // J, slot % J
    expert = tl.load(experts + token * K + j, mask=is_slot & (j < K), other=0)
    if K < J:
        expert = tl.where(j < K, expert, (E - J + j).to(tl.int64))
    if HAS_ROWS:
        expert = tl.where(token < tl.load(num_rows), expert, E)
    return expert


@triton.jit(do_not_specialize=["M"])
def _permute(
    x,
    experts,
    num_rows,
    order,
    inverse,
    offsets,
    rows,
    D,
    x_stride,
    E,
    M,
    K: tl.constexpr,
    J: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SCANS: tl.constexpr,
    COPIES: tl.constexpr,
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
            expert = _expert_of(experts, num_rows, mine, is_slot, E, K, J, HAS_ROWS)
        else:  # the first slot of an expert comes after all smaller ones and none of its own
            mine = (block - num_blocks) * BS + tl.arange(0, BS)
            expert = mine.to(tl.int64)
        before = tl.zeros((BS,), dtype=tl.int32)
        for scan in range(SCANS):
            other = scan * BM + tl.arange(0, BM)
            their = _expert_of(experts, num_rows, other, other < M, E, K, J, HAS_ROWS)
            their = tl.where(other < M, their, 9223372036854775807)
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
    if COPIES:  # noqa: SIM102 (one of the two is known to the compiler)
        if block < num_blocks:
            at = tl.program_id(1) * BD + tl.arange(0, BD)
            both = is_slot[:, None] & (at < D)[None, :]
            token = (mine // J).to(tl.int64)
            values = tl.load(x + token[:, None] * x_stride + at[None, :], mask=both)
            tl.store(rows + place[:, None] * D + at[None, :], values, mask=both)


@triton.jit(do_not_specialize=["M"])
def _count(
    experts,
    num_rows,
    counts,
    M,
    E,
    K: tl.constexpr,
    J: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """How often each expert is in a block of slots; padding, and slots behind the end, count for
    bin E."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(experts, num_rows, slot, slot < M, E, K, J, HAS_ROWS)
    expert = tl.where(slot < M, expert, E).to(tl.int32)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["M", "num_blocks"])
def _place(
    experts,
    num_rows,
    counts,
    order,
    inverse,
    offsets,
    M,
    E,
    num_blocks,
    K: tl.constexpr,
    J: tl.constexpr,
    HAS_ROWS: tl.constexpr,
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
    expert = _expert_of(experts, num_rows, slot, is_slot, E, K, J, HAS_ROWS)
    expert = tl.where(is_slot, expert, E).to(tl.int32)
    place = tl.gather(first + before, expert, axis=0)
    for step in range(BLOCK // STEP):
        other = block * BLOCK + step * STEP + tl.arange(0, STEP)
        their = _expert_of(experts, num_rows, other, other < M, E, K, J, HAS_ROWS)
        own = (their.to(tl.int32)[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
        place += tl.sum(own.to(tl.int32), axis=1)
    tl.store(order + place, slot.to(tl.int64), mask=is_slot)
    tl.store(inverse + slot, place.to(tl.int64), mask=is_slot)


class Slots(NamedTuple):
    """What the kernels are told about the slots."""

    experts_NK: Tensor
    num_slots: int
    num_experts: int
    num_rows_1: Tensor | None

    def counted(self) -> dict[str, Any]:
        rows = self.num_rows_1
        return {
            "K": self.experts_NK.shape[1],
            "J": self.num_slots,
            "HAS_ROWS": rows is not None,
        }

    def pointers(self) -> tuple[Tensor, Tensor]:
        experts = self.experts_NK
        return experts, experts if self.num_rows_1 is None else self.num_rows_1


def _places_by_blocks(slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offsets)."""
    experts, num_experts = slots.experts_NK, slots.num_experts
    m = experts.shape[0] * slots.num_slots
    blocks, bins = -(-m // BLOCK), triton.next_power_of_2(num_experts + 1)
    counts = experts.new_empty(blocks, int(bins), dtype=torch.int32)
    order_M, inverse_M = experts.new_empty(m), experts.new_empty(m)
    offsets_E1 = experts.new_empty(num_experts + 1)
    shape = {**slots.counted(), "BLOCK": BLOCK, "BINS": bins}
    _count[(blocks,)](*slots.pointers(), counts, m, num_experts, **shape, num_warps=4)
    _place[(blocks,)](
        *slots.pointers(),
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
        STEP=32,
        num_warps=8,
        **shape,
    )
    return order_M, inverse_M, offsets_E1


def _places_by_sort(slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    experts_M = all_slots(*slots).reshape(-1)
    sorted_M, order_M = torch.sort(experts_M, stable=True)
    slots_M = torch.arange(experts_M.shape[0], device=experts_M.device)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, slots_M)
    ids_E1 = torch.arange(slots.num_experts + 1, device=experts_M.device)
    return order_M, inverse_M, torch.searchsorted(sorted_M, ids_E1)


def _launch(
    x_ND: Tensor | None, slots: Slots, order: tuple[Tensor, ...], rows: Tensor, *, counts: bool
) -> None:
    """`_permute`: it counts places, or copies rows, or does both."""
    m, d = order[0].shape[0], 0 if x_ND is None else x_ND.shape[1]
    block = min(512, max(16, triton.next_power_of_2(d)))
    blocks = triton.cdiv(m, SLOTS)
    blocks += triton.cdiv(slots.num_experts + 1, SLOTS) if counts else 0
    _permute[(blocks, max(1, triton.cdiv(d, block)))](
        rows if x_ND is None else x_ND,
        *slots.pointers(),
        *order,
        rows,
        d,
        d if x_ND is None else x_ND.stride(0),
        slots.num_experts,
        m,
        # A power of two: few kernels to compile.
        SCANS=triton.next_power_of_2(triton.cdiv(m, SCAN)) if counts else 0,
        COPIES=x_ND is not None,
        BS=SLOTS,
        BM=SCAN,
        BD=block,
        num_warps=4,
        **slots.counted(),
    )


def moe_permute(
    x_ND: Tensor | None,
    experts_NJ: Tensor,
    num_experts: int,
    at_once: int = AT_ONCE,
    in_blocks: int = IN_BLOCKS,
    *,
    num_slots: int | None = None,
    num_rows_1: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without x the first result is of no use."""
    n, k = experts_NJ.shape
    slots = Slots(experts_NJ.contiguous(), num_slots or k, num_experts, num_rows_1)
    m = n * slots.num_slots
    counts = 0 < m <= at_once
    if counts:
        order = (*experts_NJ.new_empty(2, m).unbind(), experts_NJ.new_empty(num_experts + 1))
    elif 0 < m <= in_blocks:
        order = _places_by_blocks(slots)
    else:
        order = _places_by_sort(slots)
    rows_MD = order[0]
    if x_ND is not None:
        x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
        rows_MD = x_ND.new_empty(m, x_ND.shape[1])
    if m and (counts or x_ND is not None):
        _launch(x_ND, slots, order, rows_MD, counts=counts)
    return rows_MD, *order


def copy_rows(x_ND: Tensor, order: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The rows that `moe_permute` copies, of a permutation that is known."""
    m = order[0].shape[0]
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    rows_MD = x_ND.new_empty(m, x_ND.shape[1])
    if m:
        slots = Slots(order[1].reshape(x_ND.shape[0], -1), m // x_ND.shape[0], 0, None)
        _launch(x_ND, slots, order, rows_MD, counts=False)
    return rows_MD
