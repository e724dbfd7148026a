"""Attention with a relative bias, row by row and in one dtype: what the attention ops compute, with
none of their tiles, chunks and masks.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def scores(
    q_HC: Tensor, k_TUC: Tensor, r_HB: Tensor, proj_BE: Tensor, window: int | None
) -> Tensor:
    """Scores [H, J] of the newest row against the last J keys that it may see."""
    heads, channels = q_HC.shape
    seen = k_TUC if window is None else k_TUC[-window:]
    k_JHC = seen.repeat_interleave(heads // k_TUC.shape[1], 1)
    score_HJ = (q_HC * k_JHC).sum(-1).T / channels
    near = min(proj_BE.shape[1], len(seen))
    bias_HJ = (r_HB @ proj_BE)[:, :near].flip(1)
    far_HJ = score_HJ[:, : len(seen) - near]
    return torch.cat([far_HJ, score_HJ[:, len(seen) - near :] + bias_HJ], 1)


def attend_rows(
    q_NHC: Tensor,
    k_TUC: Tensor,
    v_TUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The last N of T rows of one sequence: (output, sum of |weight * value|), both [N, H, C]."""
    before = len(k_TUC) - len(q_NHC)
    repeat = q_NHC.shape[1] // k_TUC.shape[1]
    out: list[Tensor] = []
    size: list[Tensor] = []
    for row in range(len(q_NHC)):
        end = before + row + 1
        score_HJ = scores(q_NHC[row], k_TUC[:end], r_NHB[row], proj_BE, window)
        weight_HJ = torch.softmax(score_HJ, -1)
        v_HJC = v_TUC[end - score_HJ.shape[1] : end].repeat_interleave(repeat, 1).transpose(0, 1)
        out.append((weight_HJ[..., None] * v_HJC).sum(1))
        size.append((weight_HJ[..., None] * v_HJC.abs()).sum(1))
    return torch.stack(out), torch.stack(size)


def attend_packed(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`attend_rows` of each packed sequence."""
    parts = [
        attend_rows(q_NHC[a:b], k_NUC[a:b], v_NUC[a:b], r_NHB[a:b], proj_BE, window)
        for a, b in pairwise(seq_starts_S1.tolist())
    ]
    out, size = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(size)


def _tiles(first: int, last: int, tile: int, chunk: int) -> Iterator[tuple[bool, int, int]]:
    """(starts a chunk, first key, end) of the tiles that hold keys first..last."""
    for start in range(first // tile * tile, last + 1, tile):
        yield start % chunk == 0, max(start, first), min(start + tile, last + 1)


def attend_by_the_contract(
    q_HC: Tensor,
    k_TUC: Tensor,
    v_TUC: Tensor,
    r_HB: Tensor,
    proj_BE: Tensor,
    window: int | None,
    *,
    tile: int,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    """The newest row [H, C] in fp64, except that exp(score - running max of the tile) is rounded to
    `dtype` before it meets the values. The running max starts anew in every chunk.
    """
    score_HJ = scores(q_HC, k_TUC, r_HB, proj_BE, window)
    first, last = len(k_TUC) - score_HJ.shape[1], len(k_TUC) - 1
    repeat = q_HC.shape[0] // k_TUC.shape[1]
    v_HTC = v_TUC.repeat_interleave(repeat, 1).transpose(0, 1)
    most_H = score_HJ.amax(-1)
    weight_H = torch.exp(score_HJ - most_H[:, None]).sum(-1)
    out_HC = torch.zeros_like(q_HC)
    running_H = torch.full_like(most_H, -torch.inf)
    for starts_chunk, begin, end in _tiles(first, last, tile, chunk):
        part_HJ = score_HJ[:, begin - first : end - first]
        old_H = torch.full_like(most_H, -torch.inf) if starts_chunk else running_H
        running_H = torch.maximum(old_H, part_HJ.amax(-1))
        p_HJ = torch.exp(part_HJ - running_H[:, None]).to(dtype).to(score_HJ.dtype)
        value_HC = (p_HJ[..., None] * v_HTC[:, begin:end]).sum(1)
        out_HC = out_HC + value_HC * torch.exp(running_H - most_H)[:, None]
    return out_HC / weight_H[:, None]
