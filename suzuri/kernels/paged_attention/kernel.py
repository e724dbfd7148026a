"""Triton kernels of paged attention: tiles of rows for long sequences, split keys for short ones.

A sequence of at most `Plan.longest` new rows goes to the split kernel: its programs each walk a run
of chunks and write every chunk's partial in fp32, which the combine kernel folds in chunk order.
Longer ones go to the rows kernel of relative_attention. Which one a row goes through does not show
in its bits. All of the choice is made from shapes on the host and from lengths on the device.
"""

# Triton's decorators leave pyright without the types of launches, constants and loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAssignmentType=false

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from suzuri.kernels.relative_attention import kernel as rows
from suzuri.kernels.relative_attention.kernel import (
    EMPTY_MAX,
    add_tile,
    bias_rows,
    finish,
    fold,
    key_tile,
    mask_scores,
    query_tile,
    score_tile,
)
from suzuri.kernels.relative_attention.reference import TILE

LONGEST = 16
"""New rows of a sequence that the split kernel takes beside longer sequences."""
PROGRAMS, LEAST_PROGRAMS = 4096, 128
"""Programs of the split kernel, all and of one sequence and KV head, that are enough."""
FEW_CHUNKS = 512
"""Up to so many chunks of all sequences and KV heads SMs have little to do: load keys ahead."""
FEW_TILES = 88
"""Up to so many tiles of rows leave most SMs idle: their keys are split, though that takes up to
2.6 times as long once all SMs have work (benchmarks/results/split-or-rows.json)."""
MOST_CHUNKS = 32
"""Chunks that a program walks at most, so that one long sequence is spread widely."""
WORKSPACE = 1 << 29
"""Bytes of partial results at once; more chunks are taken in several passes, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a call is launched; no bit depends on it."""

    rows: rows.Launch
    longest: int
    """Sequences of at most this many new rows are split."""
    tokens: int
    """Tokens of a tile of the split kernel, a power of two."""
    warps: int
    stages: int
    programs: int
    """Programs per sequence and KV head."""
    chunks: int
    """Chunks of a pass."""
    passes: int
    columns: int
    """Columns of a head that a program of the combine kernel folds, a power of two."""


@triton.jit
def _chunk_range(first, length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Number of the first chunk that a sequence's new rows see, and one beyond the last."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // CHUNK
    return begin, (first + length - 1) // CHUNK + 1


@triton.jit(do_not_specialize=["pass_begin", "pass_chunks", "longest", "places", "rows_near"])
def _split_kernel(
    q, k, v, r, near, table, firsts, starts, part_o, part_l, part_m,
    pass_begin, pass_chunks, longest, places, rows_near, s_table,
    s_qrow, s_qhead, s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, s_rrow, s_rhead,
    s_width, s_reach, c, c_bias, a_scale,
    HEADS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BT: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, REACH: tl.constexpr, Y0: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, BIAS_FIRST: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Runs of chunks of one sequence and KV head. Programs that follow each other take the tiles
    of rows of one run, so that its keys come from memory once. With BT = 1, `near` is proj."""
    KB: tl.constexpr = BT * DP
    KP: tl.constexpr = min(KB, 128)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    base = tl.load(starts + seq).to(tl.int32)
    length = tl.load(starts + seq + 1).to(tl.int32) - base
    first = tl.load(firsts + seq).to(tl.int32)
    if (length <= 0) | (length > longest):
        return
    table += seq.to(tl.int64) * s_table
    chunk_begin, chunk_end = _chunk_range(first, length, WINDOW, CHUNK)
    chunk_begin += pass_begin
    chunk_end = tl.minimum(chunk_end, chunk_begin + pass_chunks)
    if chunk_begin >= chunk_end:
        return
    place = base
    if places > 0:
        place = seq * places
    blocks = tl.cdiv(length, BT)
    per_run = tl.cdiv(chunk_end - chunk_begin, tl.maximum(tl.num_programs(0) // blocks, 1))
    runs = tl.cdiv(chunk_end - chunk_begin, per_run)
    items = blocks * runs
    m_index = tl.arange(0, BM)
    head = kv_head * G + m_index % GP
    for item in range(program, items, tl.num_programs(0)):
        token = item % blocks * BT
        lo = first + token
        num = tl.minimum(length - token, BT)
        last = lo + BT - 1
        position = lo + m_index // GP
        chunk = chunk_begin + (runs - 1 - item // blocks) * per_run  # near ones take longest
        begin = chunk * CHUNK
        end = tl.minimum(tl.minimum(chunk + per_run, chunk_end) * CHUNK, lo + num)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(lo - WINDOW + 1, 0)
            begin = tl.maximum(begin, first_key // BN * BN)
        queries = query_tile(
            q, base + token, num, kv_head * G, s_qrow, s_qhead, G, GP, BM, C, CP
        )  # fmt: skip
        a = bias_rows(
            r, base + token, num, kv_head * G, s_rrow, s_rhead, G, GP, BM, D, DP, KB, KP, 0
        )  # fmt: skip
        a2 = a
        if KB > KP:
            a2 = bias_rows(
                r, base + token, num, kv_head * G, s_rrow, s_rhead, G, GP, BM, D, DP, KB, KP, 1
            )  # fmt: skip
        if BT == 1:
            a = (a.to(tl.float32) * a_scale).to(a.dtype)
            near_row = _near_row(near, begin, lo, s_width, s_reach, D, DP, REACH, BN)
        real = (m_index // GP < num) & (m_index % GP < G)
        at = (place + token + m_index // GP).to(tl.int64) * HEADS + head
        at = at * pass_chunks
        acc = tl.zeros((BM, CP), tl.float32)
        part = tl.zeros((BM, 8), tl.float32)
        m = tl.full((BM,), EMPTY_MAX, tl.float32)
        for k0 in tl.range(begin, end, BN, num_stages=STAGES):
            keys = key_tile(
                k, k0, 0, table, kv_head, s_kpage, s_krow, s_khead, first_key, first + length,
                C, CP, PAGE, TMA, STAGES > 2, BN,
            )  # fmt: skip
            if BT == 1:
                b = near_row
                near_row = _near_row(near, k0 + BN, lo, s_width, s_reach, D, DP, REACH, BN)
                s = _score_row(
                    queries, keys, a, b, k0, lo, c_bias, REACH, BIAS_FIRST, SCALED, BM, BN
                )  # fmt: skip
            else:
                s = score_tile(
                    queries, keys, a, a2, near, k0, last, rows_near, c_bias, REACH, Y0, KB, KP, DP,
                    True, False, BIAS_FIRST, SCALED, BM, BN,
                )  # fmt: skip
            s = mask_scores(s, position, k0, lo, last, WINDOW, BN)
            values = key_tile(
                v, k0, 0, table, kv_head, s_vpage, s_vrow, s_vhead, first_key, first + length,
                C, CP, PAGE, TMA, STAGES > 2, BN,
            )  # fmt: skip
            acc, part, m = add_tile(s, values, acc, part, m, c, BM, True)
            if ((k0 + BN) % CHUNK == 0) | (k0 + BN >= end):
                to = at + (k0 // CHUNK - chunk_begin)
                column = tl.arange(0, CP)
                tl.store(
                    part_o + (to * CP)[:, None] + column[None, :],
                    acc,
                    real[:, None] & (column < CP)[None, :],
                )
                tl.store(part_l + (to * 8)[:, None] + tl.arange(0, 8)[None, :], part, real[:, None])
                tl.store(part_m + to, m, real)
                acc = tl.zeros_like(acc)
                part = tl.zeros_like(part)
                m = tl.full((BM,), EMPTY_MAX, tl.float32)


@triton.jit
def _near_row(
    proj, k0, position, s_width, s_reach,
    D: tl.constexpr, DP: tl.constexpr, REACH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """B^T [DP, 64] of one token, from proj itself: loaded a tile ahead, as no copy engine does."""
    distance = position - (k0 + tl.arange(0, BN))
    d = tl.arange(0, DP)
    inside = ((distance >= 0) & (distance < REACH))[None, :] & (d < D)[:, None]
    where = proj + (d * s_width)[:, None] + (distance * s_reach)[None, :]
    return tl.load(where, inside, other=0.0)


@triton.jit
def _score_row(
    q, k, a, b, k0, position, c_bias, REACH: tl.constexpr, BIAS_FIRST: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`score_tile` of one token."""
    if BIAS_FIRST:
        s = tl.zeros((BM, BN), tl.float32)
        if k0 + BN > position - REACH + 1:
            s = tl.dot(a, b, s, input_precision="ieee")
        if SCALED:
            s = s * c_bias
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if k0 + BN > position - REACH + 1:
            s = tl.dot(a, b, s, input_precision="ieee")
    return s


@triton.jit(
    do_not_specialize=["num_seqs", "pass_begin", "pass_chunks", "longest", "places", "is_last"]
)
def _combine_kernel(
    part_o, part_l, part_m, sum_o, sum_l, sum_m, firsts, starts, out,
    num_seqs, pass_begin, pass_chunks, longest, places, is_last, s_orow, s_ohead, c,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SEARCH: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Folds the chunks that one row sees, in order, for some columns of one head.

    The row is the program's place: packed row, or with places > 0 row place % places of sequence
    place // places. `sum` carries (o, l, m) from pass to pass. Rows of no sequence get zeros.
    """
    place = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if places > 0:
        seq = place // places
        token = place % places
        row = tl.load(starts + seq).to(tl.int32) + token
    else:
        row = place
        seq = 0
        for i in range(0, num_seqs, SEARCH):
            s = i + tl.arange(0, SEARCH)
            end = tl.load(starts + s + 1, s < num_seqs, other=0).to(tl.int32)
            seq += tl.sum(((end <= row) & (s < num_seqs)).to(tl.int32))
        if seq >= num_seqs:
            to = out + row.to(tl.int64) * s_orow + head.to(tl.int64) * s_ohead
            zero = tl.zeros((COLUMNS,), out.dtype.element_ty)
            tl.store(to + column, zero, column < C)
            return
        token = row - tl.load(starts + seq).to(tl.int32)
    length = (tl.load(starts + seq + 1) - tl.load(starts + seq)).to(tl.int32)
    if (token >= length) | (length > longest):
        return
    first = tl.load(firsts + seq).to(tl.int32)
    chunk_base, _ = _chunk_range(first, length, WINDOW, CHUNK)
    chunk_base += pass_begin
    begin, end = _chunk_range(first + token, 1, WINDOW, CHUNK)
    begin = tl.maximum(begin - chunk_base, 0)
    end = tl.minimum(end - chunk_base, pass_chunks)
    at = place.to(tl.int64) * HEADS + head
    o = tl.zeros((1, COLUMNS), tl.float32)
    total = tl.zeros((1, 8), tl.float32)
    most = tl.full((1,), EMPTY_MAX, tl.float32)
    eight = tl.arange(0, 8)
    split = at * tl.num_programs(2) + tl.program_id(2)
    if pass_begin > 0:
        o = tl.load(sum_o + at * CP + column)[None, :]
        total = tl.load(sum_l + split * 8 + eight)[None, :]
        most = tl.load(sum_m + split + tl.arange(0, 1))
    at_part = at * pass_chunks
    for first_chunk in range(begin, end, UNROLL):
        # So many at once that their loads wait together; those beyond the end change nothing.
        for j in tl.static_range(UNROLL):
            i = first_chunk + j
            # (Masks of blocks: Triton 3.9's interpreter takes no scalar for them.)
            columns, sums = column < tl.where(i < end, CP, 0), eight < tl.where(i < end, 8, 0)
            one = tl.arange(0, 1) < tl.where(i < end, 1, 0)
            acc = tl.load(part_o + (at_part + i) * CP + column, columns, other=0.0)[None, :]
            part = tl.load(part_l + (at_part + i) * 8 + eight, sums, other=0.0)[None, :]
            m = tl.load(part_m + at_part + i + tl.arange(0, 1), one, other=EMPTY_MAX)
            o, total, most = fold(o, total, most, acc, part, m, c)
    if is_last > 0:
        value = tl.reshape(finish(o, total, 1, True), (COLUMNS,))
        to = out + row.to(tl.int64) * s_orow + head.to(tl.int64) * s_ohead
        tl.store(to + column, value.to(out.dtype.element_ty), column < C)
    else:
        tl.store(sum_o + at * CP + column, tl.reshape(o, (COLUMNS,)))
        tl.store(sum_l + split * 8 + eight, tl.reshape(total, (8,)))
        tl.store(sum_m + split + tl.arange(0, 1), most)


def plan_of(shape: rows.Shape, num_rows: int, num_seqs: int, capacity: int, *, tma: bool) -> Plan:
    """The launch for N rows of S sequences with page tables of `capacity` positions."""
    chunk = shape.constants["CHUNK"]
    assert isinstance(chunk, int)
    is_low = shape.dtype == torch.bfloat16
    # Of one long sequence, beside others that have a row each.
    tiles = -(-(num_rows - max(num_seqs - 1, 0)) // shape.tokens(64)) * shape.kv_heads
    longest = num_rows if tiles <= FEW_TILES else LONGEST
    num_chunks = -(-capacity // chunk)
    if shape.window is not None:
        seen = (min(longest, num_rows) + shape.window - 2) // chunk + 2
        num_chunks = min(num_chunks, seen)
    each = min(longest, -(-num_rows // max(num_seqs, 1)))  # rows of a sequence, on average
    groups = max(num_seqs, 1) * shape.kv_heads
    tokens = 1 if each == 1 else min(4, shape.tokens(32 if is_low else 16))
    warps, stages = 2, 2
    if not is_low:
        warps, stages = 4, 1
    elif tokens == 1 and groups * num_chunks <= FEW_CHUNKS:
        warps, stages = 4, 3
    num_places = places_of(longest, num_rows, num_seqs)[1]
    channels = rows.padded(shape.channels, 16)
    bytes_per_chunk = num_places * shape.heads * 4 * (channels + 9)
    chunks = max(1, min(num_chunks, WORKSPACE // max(bytes_per_chunk, 1)))
    passes = -(-num_chunks // chunks)
    blocks = -(-each // tokens)
    wide = -(-PROGRAMS // groups)
    if passes == 1:  # of several most are empty when tables are wider than sequences are long
        wide = max(wide, LEAST_PROGRAMS)
    programs = max(min(wide, blocks * chunks), blocks * -(-chunks // MOST_CHUNKS))
    many = num_places * shape.heads >= PROGRAMS // 4
    return Plan(
        rows=rows.launch_of(shape, tma=tma),
        longest=longest,
        tokens=tokens,
        warps=warps,
        stages=stages,
        programs=programs,
        chunks=chunks,
        passes=passes,
        columns=channels if many else min(channels, 32),
    )


def places_of(longest: int, num_rows: int, num_seqs: int) -> tuple[int, int]:
    """Places per sequence (0: a row's place is its packed row) and the number of places."""
    if longest * num_seqs < num_rows:
        return longest, longest * num_seqs
    return 0, num_rows


def _launch_split(
    q_NHC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    near: Tensor | None,
    k_PTUC: Tensor,
    v_PTUC: Tensor,
    table_SM: Tensor,
    firsts_S: Tensor,
    starts: Tensor,
    out: Tensor,
    shape: rows.Shape,
    plan: Plan,
) -> None:
    num_rows, num_seqs = q_NHC.shape[0], firsts_S.shape[0]
    places, num_places = places_of(plan.longest, num_rows, num_seqs)
    constants = shape.constants
    width = constants["CP"]
    assert isinstance(width, int)
    columns = min(plan.columns, width)

    def space(*dims: int) -> Tensor:
        return torch.empty(dims, dtype=torch.float32, device=q_NHC.device)

    part_o, part_l, part_m = (space(num_places, shape.heads, plan.chunks, n) for n in (width, 8, 1))
    sums = (part_o, part_l, part_m)
    if plan.passes > 1:
        splits = width // columns
        sums = (
            space(num_places, shape.heads, width),
            space(num_places, shape.heads, splits, 8),
            space(num_places, shape.heads, splits),
        )
    keys, values = k_PTUC, v_PTUC
    if plan.rows.tma:
        keys, values = (rows.rows_descriptor(x.flatten(0, 1)) for x in (k_PTUC, v_PTUC))
    bias = proj_BE if near is None else near
    kv_strides = [s for x in (k_PTUC, v_PTUC) for s in x.stride()[:3]]
    c, c_bias = shape.scales
    for number in range(plan.passes):
        begin = number * plan.chunks
        _split_kernel[(plan.programs, shape.kv_heads, num_seqs)](
            q_NHC, keys, values, r_NHB, bias, table_SM, firsts_S, starts, part_o, part_l, part_m,
            begin, plan.chunks, plan.longest, places, bias.shape[0], table_SM.stride(0),
            *q_NHC.stride()[:2], *kv_strides, *r_NHB.stride()[:2], *proj_BE.stride(),
            c, c_bias, shape.near_scale,
            HEADS=shape.heads, BT=plan.tokens, PAGE=k_PTUC.shape[1], TMA=plan.rows.tma,
            BM=max(16, plan.tokens * rows.padded(shape.heads // shape.kv_heads)),
            STAGES=plan.stages, num_warps=plan.warps, enable_fp_fusion=False, **constants,
        )  # fmt: skip
        _combine_kernel[(num_places, shape.heads, width // columns)](
            part_o, part_l, part_m, *sums, firsts_S, starts, out,
            num_seqs, begin, plan.chunks, plan.longest, places, int(number == plan.passes - 1),
            *out.stride()[:2], c,
            HEADS=shape.heads, C=shape.channels, CP=width, WINDOW=constants["WINDOW"],
            CHUNK=constants["CHUNK"], COLUMNS=columns, SEARCH=rows.SEARCH,
            UNROLL=min(16, rows.padded(plan.chunks)), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def paged_attention(
    q_NHC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    k_pages_PTUC: Tensor,
    v_pages_PTUC: Tensor,
    page_table_SM: Tensor,
    first_positions_S: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
    plan: Plan | None = None,
) -> Tensor:
    """The contract in __init__.py."""
    num_rows, num_seqs = q_NHC.shape[0], first_positions_S.shape[0]
    _, page, kv_heads, _ = k_pages_PTUC.shape
    shape = rows.shape_of(q_NHC, kv_heads, proj_BE, window)
    if k_pages_PTUC.stride(-1) != 1 or v_pages_PTUC.stride(-1) != 1:
        raise NotImplementedError("paged_attention: no GPU kernel for pages with strided channels")
    q_NHC, r_NHB, page_table_SM = map(rows.inner_contiguous, (q_NHC, r_NHB, page_table_SM))
    firsts_S, starts = first_positions_S.contiguous(), seq_starts_S1.contiguous()
    out = torch.empty(q_NHC.shape, dtype=q_NHC.dtype, device=q_NHC.device)
    if not out.numel():
        return out
    if num_seqs == 0:
        return out.zero_()
    if plan is None:
        plan = plan_of(
            shape,
            num_rows,
            num_seqs,
            page_table_SM.shape[1] * page,
            tma=can_tma_pages(k_pages_PTUC, v_pages_PTUC),
        )
    has_long = plan.longest < num_rows
    near = rows.near_of(proj_BE, shape) if has_long or plan.tokens > 1 else None
    if has_long:
        assert near is not None
        rows.launch_rows(
            q_NHC, k_pages_PTUC, v_pages_PTUC, r_NHB, near, starts, out, shape, plan.rows,
            paged=(page, page_table_SM, firsts_S), shortest=plan.longest + 1,
        )  # fmt: skip
    if plan.longest > 0:
        _launch_split(
            q_NHC, r_NHB, proj_BE, near if plan.tokens > 1 else None,
            k_pages_PTUC, v_pages_PTUC, page_table_SM, firsts_S, starts, out, shape, plan,
        )  # fmt: skip
    return out


def can_tma_pages(*pages_PTUC: Tensor) -> bool:
    """A tile of keys lies in one page, and pages follow each other without gaps."""
    size = pages_PTUC[0].shape[1]
    is_dense = all(x.stride(0) == size * x.stride(1) for x in pages_PTUC)
    return size % TILE == 0 and is_dense and rows.can_tma(*(x.flatten(0, 1) for x in pages_PTUC))
