"""As reference.py, with the keys of several tiles in one library call.

Tiles are walked in steps: step j of a sequence is the j-th tile that one of its rows can see. Which
tiles those are, what each row sees of them and where its bias lies is found out once for all layers
of a batch. A step that a sequence does not have is left out of the products and is an exact
identity in the fold, as a fully masked tile is in the reference.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.arrays import Array, array, tensor, tree
from suzuri.kernels.kept import kept
from suzuri.kernels.relative_attention.reference import (
    CHUNK_GLOBAL,
    CHUNK_LOCAL,
    EMPTY_MAX,
    ROWS,
    TILE,
)
from suzuri.kernels.scratch import operand, scratch

Partial = tuple[Array, Array, Array]
"""Running max [S, H, T], sum of weights [S, H, T], weighted values [S, H, T, C]."""

MOST_KEPT = 1 << 20
"""Scores up to which the plan of a batch is kept for the next layer."""
MOST_KEYS = 1 << 22
"""Elements of the fp64 keys that are handled at once."""


class _Shape(NamedTuple):
    """What the plan must know of the pages and the bias."""

    num_pages: int
    page_size: int
    row_size: int
    heads: int
    reach: int
    window: int | None


class _Span(NamedTuple):
    """Some steps J of all S sequences. W counts the tiles among them that exist.

    pages_X: rows of the flattened pages to gather, TILE keys each where pages are whole tiles, else
    one key each. owner_W: sequence of each tile (None: one tile per sequence, in order). items_W:
    its place among the S * J; place_Y: the other way round, 0 for steps that do not exist; absent_Y
    marks those (all three None: every step exists). hidden [S, J, 1, T, TILE]: keys that a row does
    not see; index [S, J, H, T, TILE]: where in the flat bias. resets: per step the sequences
    [S, 1, 1] whose tile begins a chunk (None: none).
    """

    pages_X: Array
    owner_W: Array | None
    items_W: Array | None
    place_Y: Array | None
    absent_Y: Array | None
    hidden: Array
    index: Array
    resets: tuple[Array | None, ...]


class _Block(NamedTuple):
    """Rows begin .. end - 1 of G sequences with equally many rows; rows_M are these rows in the
    batch (None: all rows, in order)."""

    rows_M: Array | None
    num_seqs: int
    spans: Iterable[_Span]


class _Spans:
    """Iterable: the spans of a block, made each time."""

    first_S: Array
    num_scores: int

    def __init__(
        self, table_SM: Array, first_S: Array, begin: int, end: int, shape: _Shape
    ) -> None:
        self.table_SM, self.first_S, self.shape = table_SM, first_S, shape
        self.begin, self.end = begin, end
        first_key_S = first_S * 0
        if shape.window is not None:
            first_key_S = np.maximum(first_S + (begin - shape.window + 1), 0)
        self.first_tile_S = first_key_S // TILE
        self.count_S = (first_S + (end - 1)) // TILE - self.first_tile_S + 1
        self.num_steps = int(self.count_S.max())
        self.num_scores = len(first_S) * self.num_steps * (end - begin) * TILE * shape.heads

    def __iter__(self) -> Iterator[_Span]:
        keys = len(self.first_S) * TILE * self.shape.row_size
        most = max(min(ROWS // (self.end - self.begin), MOST_KEYS // keys), 1)
        for step in range(0, self.num_steps, most):
            yield self._span(step, min(step + most, self.num_steps))

    def _span(self, step: int, stop: int) -> _Span:
        shape, num_seqs, num_rows = self.shape, len(self.first_S), self.end - self.begin
        step_J = np.arange(step, stop)
        tile_SJ = self.first_tile_S[:, None] + step_J
        exists_SJ = step_J < self.count_S[:, None]
        key_SJB = tile_SJ[..., None] * TILE + np.arange(TILE)
        position_ST = self.first_S[:, None] + np.arange(self.begin, self.end)
        distance = (position_ST[:, None, :, None] - key_SJB[:, :, None])[:, :, None]
        seen = distance >= 0
        if shape.window is not None:
            seen &= distance < shape.window
        # A key that the bias does not reach reads the first column of zeros.
        column = np.where(seen, np.minimum(distance, shape.reach), shape.reach)
        row = np.arange(num_seqs * num_rows).reshape(num_seqs, 1, 1, num_rows, 1) * shape.heads
        row = row + np.arange(shape.heads).reshape(1, 1, -1, 1, 1)
        chunk = CHUNK_GLOBAL if shape.window is None else CHUNK_LOCAL
        begins_SJ = exists_SJ & (tile_SJ * TILE % chunk == 0)
        exists_Y = exists_SJ.reshape(-1)
        whole, items_W = bool(exists_Y.all()), exists_Y.nonzero()[0]
        owner_W, place_Y = items_W // len(step_J), np.zeros(len(exists_Y), dtype=np.int64)
        place_Y[items_W] = np.arange(len(items_W))
        return _Span(
            pages_X=self._pages(owner_W, key_SJB.reshape(-1, TILE)[items_W]),
            owner_W=None if whole and len(step_J) == 1 else owner_W,
            items_W=None if whole else items_W,
            place_Y=None if whole else place_Y,
            absent_Y=None if whole else ~exists_Y,
            hidden=~seen,
            index=row * bias_columns(shape.reach) + column,
            resets=tuple(
                begins_SJ[:, j, None, None] if begins_SJ[:, j].any() else None
                for j in range(len(step_J))
            ),
        )

    def _pages(self, owner_W: Array, key_WB: Array) -> Array:
        """One index per tile where a page is made of whole tiles, else one per key."""
        size, unit = self.shape.page_size, unit_of(self.shape.page_size)
        key_WX = key_WB if unit == 1 else key_WB[:, :1]
        column_WX = np.minimum(key_WX // size, self.table_SM.shape[1] - 1)
        # A page that slid out of the window may be freed: its table entry is then only in range.
        page_WX = self.table_SM[owner_W[:, None], column_WX].clip(0, self.shape.num_pages - 1)
        return (page_WX * (size // unit) + key_WX % size // unit).reshape(-1)


def unit_of(page_size: int) -> int:
    """Keys per gathered row."""
    return 1 if page_size % TILE else TILE


def bias_columns(reach: int) -> int:
    """Columns of the bias with at least one of zeros, padded."""
    return -(-(reach + 1) // exact.COLUMN_PAD) * exact.COLUMN_PAD


def covers(q_NHC: Tensor, proj_BE: Tensor, *pages: Tensor) -> bool:
    """Whether one library call is enough for each product, and the pages can be viewed flat."""
    widths = (q_NHC.shape[2], proj_BE.shape[0])
    one_call = max(widths) <= exact.K_CHUNK and proj_BE.shape[1] < exact.COLUMNS_PER_CALL
    return one_call and min(widths) > 0 and all(x.is_contiguous() for x in pages)


@np.errstate(all="ignore")
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
) -> Tensor:
    num_pages, size, kv_heads, channels = k_pages_PTUC.shape
    heads, reach = q_NHC.shape[1], proj_BE.shape[1]
    shape = _Shape(num_pages, size, kv_heads * channels, heads, reach, window)
    given = (page_table_SM, first_positions_S, seq_starts_S1)
    blocks = kept(_plan, *given, params=(q_NHC.shape[0], shape))
    # NumPy knows no bf16; from here on q and r are at least fp32, with the values that they had.
    q, r = array(exact.widen(q_NHC)), array(exact.widen(r_NHB))
    pages, dtype = (k_pages_PTUC, v_pages_PTUC), q_NHC.dtype
    if len(blocks) == 1 and blocks[0].rows_M is None:
        return tensor(_attend(q, r, proj_BE, pages, blocks[0], dtype)).to(dtype)
    out_NHC = np.zeros(q_NHC.shape, q.dtype)
    for block in blocks:
        rows = slice(None) if block.rows_M is None else block.rows_M
        out_NHC[rows] = _attend(q[rows], r[rows], proj_BE, pages, block, dtype)
    return tensor(out_NHC).to(dtype)


def _plan(
    table_SM: Tensor, first_S: Tensor, starts_S1: Tensor, num_rows: int, shape: _Shape
) -> tuple[_Block, ...]:
    """Sequences with as many new rows run together, at most ROWS rows of each at once."""
    table, first, starts = (array(x).copy() for x in (table_SM, first_S, starts_S1))
    lengths = starts[1:] - starts[:-1]
    found: list[tuple[Array, _Spans]] = []
    for length in np.unique(lengths).tolist():
        group = (lengths == length).nonzero()[0]
        for begin in range(0, length, ROWS):
            end = min(begin + ROWS, length)
            rows_M = (starts[group][:, None] + np.arange(begin, end)).reshape(-1)
            found.append((rows_M, _Spans(table[group], first[group], begin, end, shape)))
    keep = sum(int(spans.num_scores) for _, spans in found) <= MOST_KEPT
    every_N = np.arange(num_rows)
    return tuple(
        _Block(
            rows_M=None if np.array_equal(rows_M, every_N) else rows_M,
            num_seqs=len(spans.first_S),
            spans=tuple(spans) if keep else spans,
        )
        for rows_M, spans in found
    )


def _bias_weight(proj_BE: Tensor) -> Tensor:
    """proj [B, E] for a product in fp64: transposed, padded, with columns of zeros behind E."""
    width, reach = proj_BE.shape
    shape = (bias_columns(reach), -(-width // exact.COLUMN_PAD) * exact.COLUMN_PAD)
    out = torch.zeros(shape, dtype=torch.float64)
    out[:reach, :width] = proj_BE.T
    return out.T


def _bias(r_MHB: Array, proj_BE: Tensor) -> Array:
    """Bias of each row and head at every distance, flat, in scratch memory."""
    weight = kept(_bias_weight, proj_BE, num_bytes=8 * proj_BE.numel())
    num_rows = r_MHB.shape[0] * r_MHB.shape[1]
    r64 = _padded(r_MHB.reshape(1, num_rows, -1))[0]
    out = scratch("bias", (r64.shape[0], weight.shape[1]), torch.float64)
    exact.multiply(r64, weight, out)
    return array(out).reshape(-1)


def _padded(x_XRK: Array) -> Tensor:
    """The operand [X, R, K] of a product, for a moment: fp64, R and K padded."""
    num, rows, k = x_XRK.shape
    shape = (num, _round_up(rows), -(-k // exact.COLUMN_PAD) * exact.COLUMN_PAD)
    whole, inner = operand(shape, rows, k)
    array(inner)[...] = x_XRK
    return whole


def _attend(
    q_MHC: Array,
    r_MHB: Array,
    proj_BE: Tensor,
    pages: tuple[Tensor, Tensor],
    block: _Block,
    dtype: torch.dtype,
) -> Array:
    num_seqs, (num_rows, heads, channels) = block.num_seqs, q_MHC.shape
    num_rows, kv_heads = num_rows // num_seqs, pages[0].shape[2]
    grouped = heads // kv_heads * num_rows
    bias = _bias(r_MHB, proj_BE)
    q_SHTC = q_MHC.reshape(num_seqs, num_rows, heads, channels).transpose(0, 2, 1, 3)
    total: Partial | None = None
    part: Partial | None = None
    for span in block.spans:
        steps = (num_seqs, len(span.resets), heads, num_rows)
        q = q_SHTC if span.owner_W is None else q_SHTC[span.owner_W]
        num_tiles = q.shape[0]
        k_XBC = _tiles(pages[0], span, num_tiles)
        out = scratch("product", (num_tiles * kv_heads, _round_up(grouped), TILE), torch.float64)
        exact.multiply(
            _padded(q.reshape(num_tiles * kv_heads, grouped, channels)), k_XBC.transpose(1, 2), out
        )
        product = (array(out)[:, :grouped] / channels).reshape(num_tiles, heads, num_rows, TILE)
        if span.place_Y is not None:
            product = product[span.place_Y]
        # The bias joins on the unrounded accumulator: a score is rounded once.
        score = product.reshape(*steps, TILE)
        score += bias.take(span.index)
        score = score.astype(q_MHC.dtype)
        np.copyto(score, -np.inf, where=span.hidden)
        maxima = _running_max(np.amax(score, -1), part, span.resets)
        score -= maxima[..., None]
        p = torch.exp(tensor(score))
        weights = tree(array(p))
        p = array(exact.widen(p.to(dtype))).reshape(-1, *steps[2:], TILE)
        p = p if span.items_W is None else p[span.items_W]
        v_XBC = _tiles(pages[1], span, num_tiles)
        out = scratch(
            "value", (num_tiles * kv_heads, _round_up(grouped), v_XBC.shape[2]), torch.float64
        )
        exact.multiply(_padded(p.reshape(num_tiles * kv_heads, grouped, TILE)), v_XBC, out)
        value = array(out)[:, :grouped, :channels].astype(q_MHC.dtype)
        value = value.reshape(num_tiles, heads, num_rows, channels)
        if span.place_Y is not None:
            value = value[span.place_Y]
            value[span.absent_Y] = 0.0
        values = value.reshape(*steps, channels)
        for j, mask in enumerate(span.resets):
            total, part = _fold_where(mask, total, part)
            part = _add_step(part, (maxima[:, j], weights[:, j], values[:, j]))
    assert part is not None
    _, weight, out = part if total is None else _fold(total, part)
    # Adding zero is the fold with an empty total: it takes the sign off a zero.
    out = (out + 0.0) / weight[..., None]
    return out.transpose(0, 2, 1, 3).reshape(-1, heads, channels)


def _round_up(rows: int) -> int:
    return -(-rows // exact.ROW_PAD) * exact.ROW_PAD


def _tiles(pages_PTUC: Tensor, span: _Span, num_tiles: int) -> Tensor:
    """The keys (or values) of the span's tiles as fp64 [W * U, TILE, padded C], for a moment."""
    _, size, kv_heads, channels = pages_PTUC.shape
    unit, columns = unit_of(size), -(-channels // exact.COLUMN_PAD) * exact.COLUMN_PAD
    rows = pages_PTUC.reshape(-1, unit, kv_heads, channels)
    picked = scratch("picked", (len(span.pages_X), *rows.shape[1:]), rows.dtype)
    index = tensor(span.pages_X)
    torch.index_select(rows, 0, index, out=picked)  # exact: a copy, without a gradient
    picked = picked.reshape(num_tiles, TILE, kv_heads, channels).transpose(1, 2)
    out = scratch("keys", (num_tiles * kv_heads, TILE, columns), torch.float64)
    out_WUBC = out.reshape(num_tiles, kv_heads, TILE, columns)
    if columns == channels:
        out_WUBC[...] = picked
    else:
        out_WUBC[..., :channels] = picked
        out_WUBC[..., channels:] = 0.0
    return out


def _running_max(most: Array, part: Partial | None, resets: tuple[Array | None, ...]) -> Array:
    """The largest score of a chunk up to each step [S, J, H, T]."""
    most = np.maximum(most, EMPTY_MAX)
    if most.shape[1] == 1 and part is None:
        return most
    latest = None if part is None else part[0]
    for j, mask in enumerate(resets):
        if latest is not None:
            if mask is not None:
                latest = np.where(mask, EMPTY_MAX, latest)
            most[:, j] = np.maximum(latest, most[:, j])
        latest = most[:, j]
    return most


def _fold_where(
    mask: Array | None, total: Partial | None, part: Partial | None
) -> tuple[Partial | None, Partial | None]:
    """Where a chunk begins, the part so far joins the total and a new part starts."""
    if mask is None or part is None:
        return total, part
    most, weight, value = part
    empty = (np.full_like(most, EMPTY_MAX), np.zeros_like(weight), np.zeros_like(value))
    before = empty if total is None else total
    masks = (mask, mask, mask[..., None])
    joined = _fold(before, part)
    a, b, c = (np.where(m, x, y) for m, x, y in zip(masks, joined, before, strict=True))
    d, e, f = (np.where(m, x, y) for m, x, y in zip(masks, empty, part, strict=True))
    return (a, b, c), (d, e, f)


def _exp(x: Array) -> Array:
    return array(torch.exp(tensor(np.ascontiguousarray(x))))


def _add_step(part: Partial | None, step: Partial) -> Partial:
    """Online softmax: `step` is relative to the max so far, which is its first entry."""
    if part is None:
        return step
    new_max, weight, value = step
    fade = _exp(part[0] - new_max)
    return new_max, part[1] * fade + weight, part[2] * fade[..., None] + value


def _fold(total: Partial, part: Partial) -> Partial:
    """As in relative_attention: the one operation by which chunks merge."""
    new_max = np.maximum(total[0], part[0])
    a, b = _exp(total[0] - new_max), _exp(part[0] - new_max)
    return (
        new_max,
        total[1] * a + part[1] * b,
        total[2] * a[..., None] + part[2] * b[..., None],
    )
