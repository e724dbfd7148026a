"""Attention over absolute tiles and chunks. `attend` is shared with paged_attention: equal bits for
prefill, chunked prefill, decode and verify follow from its being the same arithmetic on the same
keys.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from suzuri.kernels import exact

TILE = 64
CHUNK_GLOBAL = 512
CHUNK_LOCAL = 256
ROWS = 64
"""Query rows handled at once: the workspace is rows x (reach + tile), whatever the context."""
EMPTY_MAX = -1e30
"""Start of a running max: finite, so that a fully masked tile is an exact identity, not a NaN."""

KeyTile = Callable[[int], tuple[Tensor, Tensor]]


def relative_attention(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> Tensor:
    starts = seq_starts_S1.tolist()
    lengths = [*(end - begin for begin, end in pairwise(starts)), q_NHC.shape[0] - starts[-1]]
    # Splits, not slices: the backward of a slice is a whole tensor of zeros, each time.
    packed = [x.split(lengths) for x in (q_NHC, k_NUC, v_NUC, r_NHB)]
    *sequences, (rest_NHC, *_) = zip(*packed, strict=True)
    first_S = torch.zeros(1, dtype=torch.int64, device=q_NHC.device)
    parts: list[Tensor] = []
    for q_THC, k_TUC, v_TUC, r_THB in sequences:
        if len(q_THC):
            tiles = _Tiles(k_TUC, v_TUC)
            parts.append(attend(q_THC[None], r_THB[None], proj_BE, first_S, tiles, window)[0])
    return torch.cat([*parts, torch.zeros_like(rest_NHC)])


class _Tiles:
    """Callable: the keys and values k0 .. k0 + TILE - 1 of one sequence, zero filled at its end."""

    def __init__(self, k_TUC: Tensor, v_TUC: Tensor) -> None:
        missing = -len(k_TUC) % TILE
        self.tiles = [
            torch.cat([x, x.new_zeros(missing, *x.shape[1:])])[None].split(TILE, 1)
            for x in (k_TUC, v_TUC)
        ]

    def __call__(self, k0: int) -> tuple[Tensor, Tensor]:
        k_tiles, v_tiles = self.tiles
        return k_tiles[k0 // TILE], v_tiles[k0 // TILE]


def attend(
    q_STHC: Tensor,
    r_STHB: Tensor,
    proj_BE: Tensor,
    first_S: Tensor,
    tile: KeyTile,
    window: int | None,
) -> Tensor:
    """Rows at positions first_S[s] + t of S sequences against the keys that `tile` hands out.

    tile(k0) -> (k, v), each [S, TILE, U, C]: the keys at absolute positions k0 .. k0 + TILE - 1;
    entries that no row may see must be finite. Returns [S, T, H, C] in the dtype of q.
    """
    num_rows = q_STHC.shape[1]
    position_ST = first_S[:, None] + torch.arange(num_rows, device=q_STHC.device)
    blocks = zip(*(x.split(ROWS, 1) for x in (q_STHC, r_STHB, position_ST)), strict=True)
    parts = [_attend_rows(q, r, proj_BE, position, tile, window) for q, r, position in blocks]
    return torch.cat(parts, 1)


def _attend_rows(
    q_STHC: Tensor,
    r_STHB: Tensor,
    proj_BE: Tensor,
    position_ST: Tensor,
    tile: KeyTile,
    window: int | None,
) -> Tensor:
    num_seqs, num_rows, heads, channels = q_STHC.shape
    wide = exact.at_least_fp32(q_STHC.dtype)
    reach = proj_BE.shape[1]
    bias_XE = exact.accumulate_unrounded(
        r_STHB.reshape(-1, r_STHB.shape[-1]), proj_BE.T.contiguous()
    )
    # One more column, of zeros, for every key that the bias does not reach.
    bias_XE = torch.cat([bias_XE, torch.zeros_like(bias_XE[:, :1])], 1)
    bias_SHTE = bias_XE.unflatten(0, (num_seqs, num_rows, heads)).transpose(1, 2)
    last_key = int(position_ST.max())
    first_key = 0 if window is None else max(int(position_ST.min()) - window + 1, 0)
    chunk = CHUNK_GLOBAL if window is None else CHUNK_LOCAL
    empty = (
        q_STHC.new_full((num_seqs, heads, num_rows), EMPTY_MAX, dtype=wide),
        q_STHC.new_zeros((num_seqs, heads, num_rows), dtype=wide),
        q_STHC.new_zeros((num_seqs, heads, num_rows, channels), dtype=wide),
    )
    total, part = empty, empty
    for k0 in range(first_key // TILE * TILE, last_key + 1, TILE):
        if k0 % chunk == 0:
            total, part = _fold(total, part), empty
        k_SBUC, v_SBUC = tile(k0)
        distance_STB = position_ST[..., None] - (k0 + torch.arange(TILE, device=q_STHC.device))
        seen_STB = distance_STB >= 0
        if window is not None:
            seen_STB = seen_STB & (distance_STB < window)
        near_STB = seen_STB & (distance_STB < reach)
        index_STB = torch.where(near_STB, distance_STB, reach)
        bias_SHTB = exact.select(bias_SHTE, index_STB[:, None].expand(-1, heads, -1, -1))
        product_SHTB = _heads_product(q_STHC.transpose(1, 2), k_SBUC.transpose(1, 2))
        # The bias joins on the unrounded accumulator: a score is rounded once.
        score_SHTB = (product_SHTB / channels + bias_SHTB).to(wide)
        score_SHTB = score_SHTB.masked_fill(~seen_STB[:, None], float("-inf"))
        part = _add_tile(part, score_SHTB, v_SBUC, q_STHC.dtype)
    _, weight_SHT, out_SHTC = _fold(total, part)
    return (out_SHTC / weight_SHT[..., None]).transpose(1, 2).to(q_STHC.dtype)


Partial = tuple[Tensor, Tensor, Tensor]
"""Running max [S, H, T], sum of weights [S, H, T], weighted values [S, H, T, C], all wide."""


def _add_tile(part: Partial, score_SHTB: Tensor, v_SBUC: Tensor, dtype: torch.dtype) -> Partial:
    """One step of the online softmax (Milakov and Gimelshein, 2018) over a tile of keys."""
    old_max, weight, value = part
    # The max only shifts the exponent and cancels in the result: it carries no gradient.
    new_max = torch.maximum(old_max, score_SHTB.detach().amax(-1))
    fade = exact.exp(old_max - new_max)
    p_SHTB = exact.exp(score_SHTB - new_max[..., None])
    weight = weight * fade + exact.tree_sum(p_SHTB)
    v_SUCB = v_SBUC.permute(0, 2, 3, 1)
    value = value * fade[..., None] + _heads_product(p_SHTB.to(dtype), v_SUCB).to(value.dtype)
    return new_max, weight, value


def _fold(total: Partial, part: Partial) -> Partial:
    """Adds a chunk's partial result to the total: the one operation by which chunks merge."""
    new_max = torch.maximum(total[0], part[0])
    a, b = exact.exp(total[0] - new_max), exact.exp(part[0] - new_max)
    return (
        new_max,
        total[1] * a + part[1] * b,
        total[2] * a[..., None] + part[2] * b[..., None],
    )


def _heads_product(x_SHTK: Tensor, w_SUMK: Tensor) -> Tensor:
    """x [S, H, T, K] times w [S, U, M, K] transposed, each KV head shared by H / U query heads; the
    accumulators, fp64."""
    num_seqs, heads, num_rows, k = x_SHTK.shape
    kv_heads = w_SUMK.shape[1]
    grouped = x_SHTK.reshape(num_seqs * kv_heads, heads // kv_heads * num_rows, k)
    out = exact.accumulate_unrounded(grouped, w_SUMK.reshape(num_seqs * kv_heads, -1, k))
    return out.reshape(num_seqs, heads, num_rows, -1)
