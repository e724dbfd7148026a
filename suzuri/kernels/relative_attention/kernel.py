"""Triton kernels of attention over packed rows; paged_attention shares every helper of this file.

Bits (docs/exactness.md rule 4). Keys in tiles of 64 at absolute positions, ascending. Both products
of a score go into one accumulator, in one order for all callers; row sums are a fixed tree (the
order of `tl.sum` depends on the layout); nothing is added to a `tl.dot`, the accumulator is passed;
multiply-adds are explicit. A masked tile, a zero block and an empty chunk are exact identities, so
neither the tile of rows nor the grid shows in the result.

The bias as a product. A tile has BT tokens of one sequence times the GP (a power of two) heads of
one KV head: row m is token m // GP, head m % GP. `near` holds proj with distance reversed, one row
of DP widths per distance and PAD rows of zeros around: near[y, d] = proj[d, reach - 1 + PAD - y].
With A[m, kk] = r[m, kk % DP] where kk // DP == BT - 1 - m // GP, else 0, and B[j, kk] = kk-th value
from the start of near's row of the last token's distance to key j (rows that overlap), the bias of
the tile is A B^T, without a shear. near is multiplied by C (exact for a power of two), so that the
accumulator is C times the score.
"""

# Triton's decorators leave pyright without the types of launches, constants and loops.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAssignmentType=false

import dataclasses
import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from suzuri.kernels.relative_attention.reference import CHUNK_GLOBAL, CHUNK_LOCAL, TILE

PAD = 128
"""Rows of zeros around near: more than a tile of keys and the tokens of a tile."""
SEARCH = 256
EMPTY_MAX = tl.constexpr(-1e30)
"""The max of nothing: finite, so that a masked tile is an identity and not a NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How the rows kernel is launched; no bit depends on it (except with exact=False, which is for
    benchmarks: no chunks, sums in the compiler's order)."""

    tokens: int
    """Tokens of a tile, a power of two."""
    warps: int
    far_stages: int
    near_stages: int
    tma: bool
    exact: bool = True


@triton.jit
def _half(x, BM: tl.constexpr, BN: tl.constexpr):
    a, b = tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))
    return a + b


@triton.jit
def tree_8(p, BM: tl.constexpr):
    """p [BM, 64] -> [BM, 8]: columns of the two halves added, three times."""
    return _half(_half(_half(p, BM, 64), BM, 32), BM, 16)


@triton.jit
def tree_1(x, BM: tl.constexpr):
    """x [BM, 8] -> [BM, 1]."""
    return _half(_half(_half(x, BM, 8), BM, 4), BM, 2)


@triton.jit
def fold(o, total, most, acc, part, m, c):
    """Adds a chunk (acc [BM, C], part [BM, 8], m [BM]) to what came before it."""
    new = tl.maximum(most, m)
    a = tl.exp2((most - new) * c)[:, None]
    b = tl.exp2((m - new) * c)[:, None]
    return tl.fma(o, a, acc * b), tl.fma(total, a, part * b), new


@triton.jit
def finish(o, total, BM: tl.constexpr, EXACT: tl.constexpr):
    """o / sum of weights. Adding zero takes the sign off a zero, as a fold with nothing would."""
    if EXACT:
        total = tree_1(total, BM)
    return o / total + 0.0


@triton.jit
def add_tile(s, v, acc, part, m, c, BM: tl.constexpr, EXACT: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018): s [BM, 64], v [64, C]."""
    new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2((m - new) * c)
    p = tl.exp2(tl.fma(s, c, -(new * c)[:, None]))
    if EXACT:
        row = tree_8(p, BM)
    else:
        row = tl.sum(p, 1)[:, None]
    part = tl.fma(part, alpha[:, None], row)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, part, new


@triton.jit
def mask_scores(s, position, k0, lo, hi, WINDOW: tl.constexpr, BN: tl.constexpr):
    """-inf where a row may not look. `lo`, `hi`: positions of the tile's first and last token."""
    edge = k0 + BN > lo + 1
    if WINDOW > 0:
        edge = edge | (k0 <= hi - WINDOW)
    if edge:
        distance = position[:, None] - (k0 + tl.arange(0, BN))[None, :]
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def key_tile(
    src, k0, base, table, kv_head, s_page, s_row, s_head, lo, hi,
    C: tl.constexpr, CP: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, DEEP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Keys or values k0 .. k0 + 63 [64, CP]; with pointers 0 outside of [lo, hi). PAGE 0: rows from
    row `base` on; else a row of the page table at `table`, which is read only where visible.

    DEEP: the page is looked up in a branch, where the load pipeline does not see it. Else the
    look-up is a stage of its own, and of 2 or 3 stages none is left to load keys ahead; that is
    fastest where many programs share an SM.
    """
    if TMA:
        row = base + k0
        if PAGE > 0:
            if DEEP:
                if k0 < hi:
                    row = tl.load(table + k0 // PAGE).to(tl.int32) * PAGE + k0 % PAGE
            else:
                row = tl.load(table + k0 // PAGE).to(tl.int32) * PAGE + k0 % PAGE
        tile = src.load([row, kv_head * C])
    else:
        at = k0 + tl.arange(0, BN)
        inside = (at >= lo) & (at < hi)
        if PAGE > 0:
            page = tl.load(table + at // PAGE, inside, other=0).to(tl.int64)
            row = page * s_page + (at % PAGE).to(tl.int64) * s_row
        else:
            row = (base + at).to(tl.int64) * s_row
        channel = tl.arange(0, CP)
        where = src + (row + kv_head.to(tl.int64) * s_head)[:, None] + channel[None, :]
        if CP == C:
            tile = tl.load(where, inside[:, None], other=0.0)
        else:
            tile = tl.load(where, inside[:, None] & (channel < C)[None, :], other=0.0)
    return tile


@triton.jit
def near_tile(near, y0, rows, KP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """B [64, KP]: overlapping rows of near from y0 on. By pointers: L1 holds all of a tile's few
    kilobytes, and the bulk copy engine would fetch each overlap from L2 (7 % slower)."""
    y = y0 + tl.arange(0, BN)
    kk = tl.arange(0, KP)
    inside = (y >= 0) & (y <= rows - KP // DP)
    return tl.load(near + (y * DP)[:, None] + kk[None, :], inside[:, None], other=0.0)


@triton.jit
def _add_bias(
    s, a, a2, near, y0, rows_near,
    KB: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """s + A B^T, in two parts of KB where one would need too many registers on its way."""
    b = near_tile(near, y0, rows_near, KP, DP, BN)
    s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    if KB > KP:
        b = near_tile(near, y0 + KP // DP, rows_near, KP, DP, BN)
        s = tl.dot(a2, tl.trans(b), s, input_precision="ieee")
    return s


@triton.jit
def score_tile(
    q, k, a, a2, near, k0, last, rows_near, c_bias,
    REACH: tl.constexpr, Y0: tl.constexpr, KB: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
    NEAR: tl.constexpr, ALWAYS: tl.constexpr, BIAS_FIRST: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """C times the scores [BM, 64] before masking. `last`: position of the tile's token BT - 1.

    The branch keeps the bias operand out of the load pipeline, where it would cost a block of
    shared memory per stage.
    """
    y0 = Y0 - last + k0
    s = tl.zeros((BM, BN), tl.float32)
    if not BIAS_FIRST:
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    if NEAR:
        if ALWAYS:  # noqa: SIM114 (known when compiled; the other is not)
            s = _add_bias(s, a, a2, near, y0, rows_near, KB, KP, DP, BN)
        elif k0 + BN > last - (KB // DP - 1) - REACH + 1:
            s = _add_bias(s, a, a2, near, y0, rows_near, KB, KP, DP, BN)
        if SCALED:
            s = s * c_bias
    if BIAS_FIRST:
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    return s


@triton.jit
def query_tile(
    q, row, rows, head, s_row, s_head,
    G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """[BM, CP]: `rows` tokens from packed row `row` on, G heads from `head` on; 0 elsewhere."""
    m = tl.arange(0, BM)
    channel = tl.arange(0, CP)
    at = (row + m // GP).to(tl.int64) * s_row + (head + m % GP).to(tl.int64) * s_head
    real = (m // GP < rows) & (m % GP < G)
    inside = real[:, None] & (channel < C)[None, :]
    return tl.load(q + at[:, None] + channel[None, :], inside, other=0.0)


@triton.jit
def bias_rows(
    r, row, rows, head, s_row, s_head,
    G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr, KP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Columns PART * KP .. of A [BM, KB], block diagonal. Nothing is computed with what is loaded,
    so that a product of 64 rows takes it from shared memory and not from registers."""
    m = tl.arange(0, BM)
    kk = PART * KP + tl.arange(0, KP)
    at = (row + m // GP).to(tl.int64) * s_row + (head + m % GP).to(tl.int64) * s_head
    real = (m // GP < rows) & (m % GP < G)
    inside = real[:, None] & ((kk // DP)[None, :] == (KB // DP - 1 - m // GP)[:, None])
    inside = inside & (kk % DP < D)[None, :]
    return tl.load(r + at[:, None] + (kk % DP)[None, :], inside, other=0.0)


@triton.jit
def store_rows(
    out, value, row, rows, head, s_row, s_head,
    G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BM)
    channel = tl.arange(0, CP)
    at = (row + m // GP).to(tl.int64) * s_row + (head + m % GP).to(tl.int64) * s_head
    real = (m // GP < rows) & (m % GP < G)
    inside = real[:, None] & (channel < C)[None, :]
    tl.store(out + at[:, None] + channel[None, :], value.to(out.dtype.element_ty), inside)


@triton.jit
def _near_kernel(
    proj, near, num, s_width, s_reach, scale,
    D: tl.constexpr, DP: tl.constexpr, REACH: tl.constexpr, Y0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    y = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    e = Y0 - y
    inside = ((e >= 0) & (e < REACH))[:, None] & (d < D)[None, :]
    x = tl.load(proj + (d * s_width)[None, :] + (e * s_reach)[:, None], inside, other=0.0)
    x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(near + (y * DP)[:, None] + d[None, :], x, (y < num)[:, None])


@triton.jit
def find_block(starts, num_seqs, slot, BT: tl.constexpr, SEARCH: tl.constexpr):
    """The sequence of a block of BT rows: sequence s owns slots starts[s] // BT + s and on. That is
    at least as many as it has blocks, and needs no sum over the sequences before it."""
    found = 0
    for i in range(0, num_seqs, SEARCH):
        s = i + tl.arange(0, SEARCH)
        start = tl.load(starts + s, s < num_seqs, other=0).to(tl.int32)
        found += tl.sum(((start // BT + s <= slot) & (s < num_seqs)).to(tl.int32))
    return found - 1


@triton.jit
def _walk(
    o, total, most, acc, part, m, begin, end,
    q, a, a2, k, v, near, position, lo, last, base, table, kv_head, first_key, end_key, rows_near,
    s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, c, c_bias,
    C: tl.constexpr, CP: tl.constexpr, REACH: tl.constexpr, Y0: tl.constexpr, KB: tl.constexpr,
    KP: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, NEAR: tl.constexpr, ALWAYS: tl.constexpr, BIAS_FIRST: tl.constexpr,
    SCALED: tl.constexpr, K_TMA: tl.constexpr, V_TMA: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles begin .. end; a chunk's partial joins the total when the next one begins."""
    for k0 in tl.range(begin, end, BN, num_stages=STAGES):
        if EXACT:  # noqa: SIM102 (known when compiled; the other is not)
            if k0 % CHUNK == 0:
                o, total, most = fold(o, total, most, acc, part, m, c)
                acc = tl.zeros_like(acc)
                part = tl.zeros_like(part)
                m = tl.full((BM,), EMPTY_MAX, tl.float32)
        keys = key_tile(
            k, k0, base, table, kv_head, s_kpage, s_krow, s_khead, first_key, end_key,
            C, CP, PAGE, K_TMA, True, BN,
        )  # fmt: skip
        s = score_tile(
            q, keys, a, a2, near, k0, last, rows_near, c_bias, REACH, Y0, KB, KP, DP,
            NEAR, ALWAYS, BIAS_FIRST, SCALED, BM, BN,
        )  # fmt: skip
        if NEAR:
            s = mask_scores(s, position, k0, lo, last, WINDOW, BN)
        values = key_tile(
            v, k0, base, table, kv_head, s_vpage, s_vrow, s_vhead, first_key, end_key,
            C, CP, PAGE, V_TMA, True, BN,
        )  # fmt: skip
        acc, part, m = add_tile(s, values, acc, part, m, c, BM, EXACT)
    return o, total, most, acc, part, m


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "num_slots", "shortest", "rows_near"])
def rows_kernel(
    q, k, v, v_rows, r, near, table, firsts, starts, out,
    num_rows, num_seqs, num_slots, shortest, rows_near, s_table,
    s_qrow, s_qhead, s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, s_rrow, s_rhead,
    s_orow, s_ohead, c, c_bias,
    G: tl.constexpr, GP: tl.constexpr, BT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, REACH: tl.constexpr, Y0: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, BIAS_FIRST: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, FAR_STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One tile of rows against all its keys. k and v: descriptors with TMA, else pointers.

    Sequences of fewer than `shortest` rows are left to the split kernel. Blocks behind the last
    sequence write zeros.
    """
    KB: tl.constexpr = BT * DP
    KP: tl.constexpr = min(KB, 128)
    WIDE: tl.constexpr = 8 if EXACT else 1
    # Tiles of one head together: their keys stay in L2. Long ones first.
    slot = num_slots - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    end_row = tl.load(starts + num_seqs).to(tl.int32)
    rest = slot - end_row // BT - num_seqs
    if rest >= 0:
        row = end_row + rest * BT
        zero = tl.zeros((BM, CP), tl.float32)
        store_rows(
            out, zero, row, num_rows - row, kv_head * G, s_orow, s_ohead, G, GP, BM, C, CP
        )  # fmt: skip
        return
    seq = find_block(starts, num_seqs, slot, BT, SEARCH)
    base = tl.load(starts + seq).to(tl.int32)
    length = tl.load(starts + seq + 1).to(tl.int32) - base
    token = (slot - base // BT - seq) * BT
    if (token >= length) | (length < shortest):
        return
    first = 0
    if PAGE > 0:
        first = tl.load(firsts + seq).to(tl.int32)
        table += seq.to(tl.int64) * s_table
    lo = first + token
    rows = tl.minimum(length - token, BT)
    last = lo + BT - 1
    position = lo + tl.arange(0, BM) // GP
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(lo - WINDOW + 1, 0)
    begin = first_key // BN * BN
    end = lo + rows
    o = tl.zeros((BM, CP), tl.float32)
    total = tl.zeros((BM, WIDE), tl.float32)
    most = tl.full((BM,), EMPTY_MAX, tl.float32)
    acc, part, m = o, total, most
    queries = query_tile(
        q, base + token, rows, kv_head * G, s_qrow, s_qhead, G, GP, BM, C, CP
    )  # fmt: skip
    if WINDOW == 0:
        # Every key of these tiles is farther than the bias reaches from every token.
        near_begin = tl.maximum(lo - REACH + 1, 0) // BN * BN
        o, total, most, acc, part, m = _walk(
            o, total, most, acc, part, m, begin, near_begin, queries, queries, queries, k, v,
            near, position, lo, last, base, table, kv_head, first_key, first + length, rows_near,
            s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, c, c_bias,
            C, CP, REACH, Y0, KB, KP, DP, WINDOW, CHUNK, PAGE, False, False, BIAS_FIRST, SCALED,
            TMA, TMA, EXACT, BM, BN, FAR_STAGES,
        )  # fmt: skip
        begin = near_begin
    a = bias_rows(
        r, base + token, rows, kv_head * G, s_rrow, s_rhead, G, GP, BM, D, DP, KB, KP, 0
    )  # fmt: skip
    a2 = a
    if KB > KP:
        a2 = bias_rows(
            r, base + token, rows, kv_head * G, s_rrow, s_rhead, G, GP, BM, D, DP, KB, KP, 1
        )  # fmt: skip
    near_end = end
    if TMA and PAGE == 0:
        # Values behind the sequence's end are another's: even times zero they could be a NaN.
        near_end = tl.minimum(end, length // BN * BN)
    o, total, most, acc, part, m = _walk(
        o, total, most, acc, part, m, begin, near_end, queries, a, a2, k, v, near, position,
        lo, last, base, table, kv_head, first_key, first + length, rows_near,
        s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, c, c_bias,
        C, CP, REACH, Y0, KB, KP, DP, WINDOW, CHUNK, PAGE, True, WINDOW > 0, BIAS_FIRST, SCALED,
        TMA, TMA, EXACT, BM, BN, NEAR_STAGES,
    )  # fmt: skip
    if TMA and PAGE == 0:
        o, total, most, acc, part, m = _walk(
            o, total, most, acc, part, m, tl.maximum(begin, length // BN * BN), end, queries, a,
            a2, k, v_rows, near, position, lo, last, base, table, kv_head, first_key,
            first + length, rows_near, s_kpage, s_krow, s_khead, s_vpage, s_vrow, s_vhead, c,
            c_bias, C, CP, REACH, Y0, KB, KP, DP, WINDOW, CHUNK, PAGE, True, WINDOW > 0,
            BIAS_FIRST, SCALED, TMA, False, EXACT, BM, BN, 1,
        )  # fmt: skip
    if EXACT:
        acc, part, m = fold(o, total, most, acc, part, m, c)
    store_rows(
        out, finish(acc, part, BM, EXACT), base + token, rows, kv_head * G, s_orow, s_ohead,
        G, GP, BM, C, CP,
    )  # fmt: skip


def padded(n: int, least: int = 1) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the kernels are specialised for, from the arguments' shapes."""

    heads: int
    kv_heads: int
    channels: int
    width: int
    reach: int
    window: int | None
    dtype: torch.dtype

    @functools.cached_property
    def constants(self) -> dict[str, object]:
        """Compile-time arguments that every kernel takes."""
        group = self.heads // self.kv_heads
        is_power = self.channels & (self.channels - 1) == 0
        return {
            "G": group,
            "GP": padded(group),
            "C": self.channels,
            "CP": padded(self.channels, 16),
            "D": self.width,
            "DP": padded(self.width, 16),
            "REACH": self.reach,
            "Y0": self.reach - 1 + PAD,
            "WINDOW": self.window or 0,
            "CHUNK": CHUNK_GLOBAL if self.window is None else CHUNK_LOCAL,
            # Where C times proj is not exact, the bias itself is multiplied, before q.k joins it.
            "BIAS_FIRST": self.window is not None or not is_power,
            "SCALED": not is_power,
            "BN": TILE,
        }

    @property
    def scales(self) -> tuple[float, float]:
        """c and c_bias: C times the score to a power of two, the bias to C times it."""
        return math.log2(math.e) / self.channels, float(self.channels)

    @property
    def near_scale(self) -> float:
        return 1.0 if self.constants["SCALED"] else float(self.channels)

    def tokens(self, rows: int) -> int:
        """Tokens of a tile of at most `rows` rows, with at most 256 columns of A."""
        most = min(16, 256 // padded(self.width, 16))
        # Products of 64 rows with 16 or 32 channels came out wrong (Triton 3.6, bias first).
        rows = rows if self.channels > 32 else min(rows, 32)
        return max(1, min(most, rows // padded(self.heads // self.kv_heads)))


def shape_of(q_NHC: Tensor, kv_heads: int, proj_BE: Tensor, window: int | None) -> Shape:
    """Raises NotImplementedError for what no kernel covers."""
    _, heads, channels = q_NHC.shape
    shape = Shape(heads, kv_heads, channels, *proj_BE.shape, window, q_NHC.dtype)
    group = padded(heads // kv_heads)
    for what, is_covered in (
        (f"dtype {q_NHC.dtype}", q_NHC.dtype in (torch.bfloat16, torch.float32)),
        (f"head_dim {channels}", channels <= 128),
        (f"bias width {shape.width}", shape.width <= 64),
        (f"{heads // kv_heads} query heads per KV head", group <= 128),
    ):
        if not is_covered:
            raise NotImplementedError(f"attention: no GPU kernel for {what}")
    return shape


def near_of(proj_BE: Tensor, shape: Shape) -> Tensor:
    """C proj, distance reversed and zero padded [reach + 2 PAD, DP]. Made anew in each call: 1 or 2
    microseconds, and no copy that a weight update (or a captured graph) could leave behind."""
    rows, width = shape.reach + 2 * PAD, padded(shape.width, 16)
    near = torch.empty((rows, width), dtype=proj_BE.dtype, device=proj_BE.device)
    s_width, s_reach = proj_BE.stride()
    _near_kernel[(triton.cdiv(rows, 64),)](
        proj_BE, near, rows, s_width, s_reach, shape.near_scale,
        D=shape.width, DP=width, REACH=shape.reach, Y0=shape.reach - 1 + PAD, BLOCK=64,
    )  # fmt: skip
    return near


def rows_descriptor(x_XUC: Tensor) -> TensorDescriptor:
    """[X, U, C] with contiguous heads, as rows of U * C: boxes of a tile of keys of one head."""
    rows, kv_heads, channels = x_XUC.shape
    shape, strides = [rows, kv_heads * channels], [x_XUC.stride(0), 1]
    return TensorDescriptor(x_XUC, shape, strides, [TILE, channels])


def can_tma(*tensors_XUC: Tensor) -> bool:
    """Whether the bulk copy engine can read these rows (else pointers do, with the same bits)."""
    return all(
        x.dtype == torch.bfloat16
        and x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device)[0] >= 9
        and x.shape[2] in (64, 128)
        and x.stride(1) == x.shape[2]
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[0] > 0
        for x in tensors_XUC
    )


def inner_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def launch_of(shape: Shape, *, tma: bool) -> Launch:
    """The fastest on an H200, for Inkling's shapes."""
    if shape.dtype != torch.bfloat16:
        return Launch(tokens=shape.tokens(16), warps=4, far_stages=1, near_stages=1, tma=False)
    near_stages = 2 if shape.window is None else 1
    tokens = shape.tokens(64)
    return Launch(tokens=tokens, warps=4, far_stages=3, near_stages=near_stages, tma=tma)


def launch_rows(
    q_NHC: Tensor,
    k: Tensor,
    v: Tensor,
    r_NHB: Tensor,
    near: Tensor,
    starts: Tensor,
    out: Tensor,
    shape: Shape,
    launch: Launch,
    paged: tuple[int, Tensor, Tensor] | None = None,
    shortest: int = 0,
) -> None:
    """k, v [N, U, C], or pages [P, T, U, C] with paged = (T, page table, first positions)."""
    num_rows, num_seqs = q_NHC.shape[0], starts.shape[0] - 1
    tokens = launch.tokens
    page, table, firsts = paged or (0, starts, starts)
    num_slots = num_rows // tokens + num_seqs + 1
    strides = [*q_NHC.stride()[:2]]
    for x in (k, v):
        strides += [x.stride(0) if paged else 0, x.stride(-3), x.stride(-2)]
    strides += [*r_NHB.stride()[:2], *out.stride()[:2]]
    keys, values = k, v
    if launch.tma:
        keys, values = (rows_descriptor(x.flatten(0, 1) if paged else x) for x in (k, v))
    rows_kernel[(num_slots, shape.kv_heads)](
        q_NHC, keys, values, v, r_NHB, near, table, firsts, starts, out,
        num_rows, num_seqs, num_slots, shortest, near.shape[0],
        table.stride(0) if paged else 0, *strides, *shape.scales,
        **shape.constants,
        BT=tokens, PAGE=page, TMA=launch.tma, EXACT=launch.exact,
        BM=max(16, tokens * padded(shape.heads // shape.kv_heads)),
        FAR_STAGES=launch.far_stages, NEAR_STAGES=launch.near_stages, SEARCH=SEARCH,
        num_warps=launch.warps, enable_fp_fusion=False,
    )  # fmt: skip


def relative_attention(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
    launch: Launch | None = None,
) -> Tensor:
    """The contract in __init__.py, without gradients."""
    shape = shape_of(q_NHC, k_NUC.shape[1], proj_BE, window)
    q_NHC, k_NUC, v_NUC, r_NHB = map(inner_contiguous, (q_NHC, k_NUC, v_NUC, r_NHB))
    out = torch.empty(q_NHC.shape, dtype=q_NHC.dtype, device=q_NHC.device)
    if out.numel():
        launch = launch or launch_of(shape, tma=can_tma(k_NUC, v_NUC))
        near = near_of(proj_BE, shape)
        starts = seq_starts_S1.contiguous()
        launch_rows(q_NHC, k_NUC, v_NUC, r_NHB, near, starts, out, shape, launch)
    return out
