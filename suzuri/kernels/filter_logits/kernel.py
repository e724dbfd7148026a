"""The cut of each row by digits of its keys, without a sort: only integers are added.

A key is an fp32 logit as an unsigned integer of the same order. Eight launches find, four bits at
a time, the key of the last id that min_p and top_k keep, by counting; eight more the key at which
the weights reach top_p. Ids with equal keys have equal weights, so how many of them stay follows
by division; the last launches cut those by id. Integer sums have one value in any order, so they
are added with atomics. Where a row has a filter off, its launches return at once. Read
`_digits_kernel` first.
"""

# Triton's decorators leave pyright without the types of launches and of compile-time loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from suzuri.kernels import dispatch
from suzuri.kernels.filter_logits import reference

IDS = 2048
"""Ids of one program where rows are cut."""
SUMMED_IDS, SUMMING_WARPS = 1024, 2
"""Of one program of `_digits_kernel`."""
BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)
PASSES = tl.constexpr(8)
"""Launches to find a key of 32 bits."""
STATES = tl.constexpr(17)
UNITS = tl.constexpr(reference.UNITS)
KEYS = tl.constexpr(1 << 32)
FEW = tl.constexpr(64)
"""Ids of a program up to which each is added by itself, and not first to its neighbours."""
IN_TIES = tl.constexpr(-1)
"""A prefix that no key has: top_p is off, or ends among the ids that share top_k's last key."""
IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

COUNT_FIRST, COUNT, WEIGH_FIRST, WEIGH_SECOND, WEIGH = (tl.constexpr(i) for i in range(5))
"""What a launch of `_digits_kernel` does."""


@triton.jit
def _exp(x):
    # The library's, as the reference has it; the interpreter knows only the other.
    if IS_INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _key(x):
    """fp32 (never -0) to an integer in [0, 2^32) of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _logit(key):
    """The logit of a key."""
    ordered = (key - 2147483648).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, most):
    # Where x is the largest, also for infinities, exp(0).
    return (_exp(tl.where(x == most, 0.0, x - most)) * UNITS).to(tl.int64)


@triton.jit
def _load(logits, row, ids, row_stride, column_stride, vocabulary):
    at = logits + row * row_stride + ids.to(tl.int64) * column_stride
    return tl.load(at, mask=ids < vocabulary, other=float("nan")).to(tl.float32)


@triton.jit
def _pick(prefix, target, sums, digit):
    """The next digit of the key at which the sums, from the largest digit down, reach `target`."""
    reached = tl.sum(tl.where(digit[None, :] >= digit[:, None], sums[None, :], 0), axis=1)
    limited = tl.minimum(target, tl.max(reached, axis=0))
    chosen = tl.max(tl.where(reached >= limited, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > chosen, sums, 0), axis=0)
    is_open = prefix != IN_TIES
    target = tl.where(is_open, limited - above, target)
    return tl.where(is_open, prefix * DIGITS + chosen, prefix), target


@triton.jit
def _max_kernel(logits, largest, row_stride, column_stride, vocabulary, NUM: tl.constexpr):
    """The largest key of each row; 0, which is that of a NaN, where all are NaN."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * NUM + tl.arange(0, NUM)
    x = _load(logits, row, ids, row_stride, column_stride, vocabulary) + 0.0
    is_number = x == x  # noqa: PLR0124
    tl.atomic_max(largest + row, tl.max(tl.where(is_number, _key(x), 0), axis=0))


@triton.jit
def _after_top_k(prefix, target, share, most, before, digit):
    """State of the search for top_p: `prefix` is the last key that top_k keeps, `target` how many
    of its ids, `before` the weights of the ids above it."""
    last = _weight(_logit(prefix), most)
    inside = tl.sum(before, axis=0)
    total = tl.where(target > 0, inside + target * last, inside)
    wanted = (share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    wanted = tl.maximum(wanted, 1)  # the first id stays
    in_ties = (share >= 1) | (inside < wanted)
    lacking, last = tl.maximum(wanted - inside, 1), tl.maximum(last, 1)
    num_ties = tl.minimum(target, (lacking + last - 1) // last)
    num_ties = tl.where(share < 1, num_ties, target)
    prefix, target = _pick(prefix * 0, wanted, before, digit)
    return tl.where(in_ties, IN_TIES, prefix), tl.where(in_ties, num_ties, target)


@triton.jit
def _add_digits(mine, is_summed, own, weight, digit, COUNTS: tl.constexpr):
    """Adds what the many ids of a program hold of each digit, a count or a weight."""
    found = digit.to(tl.int64) * 0
    if COUNTS:  # four counts of 16 bits in one word
        for group in tl.static_range(DIGITS // 4):
            one = tl.full(own.shape, 1, tl.int64) << ((own & 3) * 16)
            word = tl.sum(tl.where(is_summed & ((own >> 2) == group), one, 0), axis=0)
            here = (word >> ((digit & 3) * 16).to(tl.int64)) & 0xFFFF
            found = tl.where((digit >> 2) == group, here, found)
    else:
        for d in tl.static_range(DIGITS):
            here = tl.sum(tl.where(is_summed & (own == d), weight, 0), axis=0)
            found = tl.where(digit == d, here, found)
    tl.atomic_add(mine + digit, found, mask=found != 0)


@triton.jit(do_not_specialize=["number"])
def _digits_kernel(
    logits,
    largest,
    min_p,
    top_k,
    top_p,
    sums,
    states,
    row_stride,
    column_stride,
    vocabulary,
    number,
    MODE: tl.constexpr,
    NUM: tl.constexpr,
):
    """Launch `number`: settles the digit that the launch before summed, then sums the next one.

    sums [N, 16, 16] int64: per launch and digit how many ids, or how much weight. states
    [N, 17, 2]: per launch (digits of the key so far, what is still to be reached below them).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    digit = tl.arange(0, DIGITS)
    most = _logit(tl.load(largest + row))
    wanted = tl.load(top_k + row).to(tl.int64)
    share = tl.load(top_p + row)
    mine = sums + (row * 2 * PASSES + number) * DIGITS
    state = states + (row * STATES + number) * 2
    if MODE == COUNT_FIRST:
        prefix, target = wanted * 0, wanted
    else:
        prefix, target = tl.load(state - 2), tl.load(state - 1)
        before = tl.load(mine - DIGITS + digit)
        if MODE == WEIGH_SECOND:
            prefix, target = _after_top_k(prefix, target, share, most, before, digit)
        else:
            prefix, target = _pick(prefix, target, before, digit)
    if MODE == WEIGH_FIRST:
        # Without top_k: the key below the lowest one that min_p keeps, and none of its ids.
        lowest = KEYS - tl.load(sums + row * 2 * PASSES * DIGITS)
        prefix = tl.where(wanted < 1, lowest - 1, prefix)
        target = tl.where(wanted < 1, 0, target)
    if part == 0:
        tl.store(state, prefix)
        tl.store(state + 1, target)
    if MODE == COUNT_FIRST:
        is_on = share == share  # noqa: PLR0124
    elif MODE == COUNT:
        is_on = wanted >= 1
    else:
        is_on = (share < 1) & (prefix != IN_TIES)
    if is_on:
        ids = part * NUM + tl.arange(0, NUM)
        x = _load(logits, row, ids, row_stride, column_stride, vocabulary) + 0.0
        key = _key(x)
        reach = -tl.log(tl.load(min_p + row))
        # NaN, and what lies beyond the vocabulary, compares as false.
        is_summed = tl.where(x == most, 0.0, most - x) <= reach
        if MODE == WEIGH_FIRST:
            is_summed = is_summed & (key > prefix)
        elif MODE >= WEIGH_SECOND:
            is_summed = is_summed & (key > tl.load(states + (row * STATES + PASSES) * 2))
        shift = (PASSES - 1 - number % PASSES) * BITS
        if MODE != WEIGH_FIRST:
            is_summed = is_summed & ((key >> (shift + BITS)) == prefix)
        num_summed = tl.sum(is_summed.to(tl.int32), axis=0)
        if num_summed > 0:
            own = (key >> shift) & (DIGITS - 1)
            weight = tl.where(is_summed, 1, 0).to(tl.int64)
            if MODE >= WEIGH_FIRST:
                weight = tl.where(is_summed, _weight(x, most), 0)
            if (MODE == COUNT_FIRST) & (wanted < 1):
                low = tl.max(tl.where(is_summed, KEYS - key, 0), axis=0)
                tl.atomic_max(sums + row * 2 * PASSES * DIGITS, low)
            elif num_summed <= FEW:  # as of the third digit or so
                tl.atomic_add(mine + own, weight, mask=is_summed & (weight != 0))
            else:
                _add_digits(mine, is_summed, own, weight, digit, MODE <= COUNT)


@triton.jit
def _ties_kernel(
    logits,
    largest,
    sums,
    states,
    ties,
    row_stride,
    column_stride,
    vocabulary,
    NUM: tl.constexpr,
):
    """Settles the last key and how many of its ids stay; counts those ids in every part."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    digit = tl.arange(0, DIGITS)
    most = _logit(tl.load(largest + row))
    before = tl.load(sums + (row * 2 * PASSES + 2 * PASSES - 1) * DIGITS + digit)
    state = states + (row * STATES + 2 * PASSES) * 2
    prefix, target = _pick(tl.load(state - 2), tl.load(state - 1), before, digit)
    in_ties = prefix == IN_TIES
    last_key = tl.where(in_ties, tl.load(states + (row * STATES + PASSES) * 2), prefix)
    last = tl.maximum(_weight(_logit(last_key), most), 1)
    stays = tl.where(in_ties, target, (target + last - 1) // last)
    if part == 0:
        tl.store(state, last_key)
        tl.store(state + 1, stays)
    ids = part * NUM + tl.arange(0, NUM)
    x = _load(logits, row, ids, row_stride, column_stride, vocabulary) + 0.0
    num_ties = tl.sum((_key(x) == last_key).to(tl.int32), axis=0)
    tl.store(ties + row * tl.num_programs(1) + part, num_ties)


@triton.jit
def _cut_kernel(
    logits,
    states,
    ties,
    out,
    row_stride,
    column_stride,
    vocabulary,
    NUM: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    state = states + (row * STATES + 2 * PASSES) * 2
    last_key, stays = tl.load(state), tl.load(state + 1)
    other = tl.arange(0, PARTS)
    earlier = tl.load(ties + row * tl.num_programs(1) + other, mask=other < part, other=0)
    ids = part * NUM + tl.arange(0, NUM)
    x = _load(logits, row, ids, row_stride, column_stride, vocabulary)
    key = _key(x + 0.0)
    place = tl.sum(earlier, axis=0) + tl.cumsum((key == last_key).to(tl.int32), axis=0)
    # NaN stays, so that the row is still seen to have no answer.
    is_number = x == x  # noqa: PLR0124
    is_removed = is_number & ((key < last_key) | ((key == last_key) & (place > stays)))
    y = tl.where(is_removed, float("-inf"), x)
    tl.store(out + row * vocabulary + ids, y, mask=ids < vocabulary)


def filter_logits(
    logits_NV: Tensor,
    min_p_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    *,
    block: int = IDS,
    num_warps: int = 4,
    summed: int = SUMMED_IDS,
    summing_warps: int = SUMMING_WARPS,
) -> Tensor:
    if logits_NV.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel(f"filter_logits of {logits_NV.dtype}", logits_NV)
    num_rows, vocabulary = logits_NV.shape
    device, passes, digits = logits_NV.device, PASSES.value, DIGITS.value
    out_NV = torch.empty((num_rows, vocabulary), dtype=torch.float32, device=device)
    if not num_rows or not vocabulary:
        return out_NV
    parts = triton.cdiv(vocabulary, block)
    ties = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    zeros = torch.zeros(num_rows * (2 * passes * digits + 1), dtype=torch.int64, device=device)
    sums, largest = zeros[num_rows:], zeros[:num_rows]
    states = torch.empty(num_rows, STATES.value, 2, dtype=torch.int64, device=device)
    min_p = min_p_N.to(torch.float32).contiguous()
    top_p = top_p_N.to(torch.float32).contiguous()
    shape = (*logits_NV.stride(), vocabulary)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    grid = (num_rows, parts)
    _max_kernel[grid](logits_NV, largest, *shape, NUM=block, **options)
    modes = [COUNT_FIRST] + [COUNT] * (passes - 1)
    modes += [WEIGH_FIRST, WEIGH_SECOND] + [WEIGH] * (passes - 2)
    for number, mode in enumerate(modes):
        _digits_kernel[(num_rows, triton.cdiv(vocabulary, summed))](
            logits_NV,
            largest,
            min_p,
            top_k_N.contiguous(),
            top_p,
            sums,
            states,
            *shape,
            number,
            MODE=mode.value,
            NUM=summed,
            num_warps=summing_warps,
            enable_fp_fusion=False,
        )
    _ties_kernel[grid](logits_NV, largest, sums, states, ties, *shape, NUM=block, **options)
    padded = triton.next_power_of_2(parts)
    _cut_kernel[grid](logits_NV, states, ties, out_NV, *shape, NUM=block, PARTS=padded, **options)
    return out_NV
