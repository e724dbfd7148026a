"""The gradient of relative_attention, of its formula before any rounding.

With p the weights of a row's keys, g the gradient of its output o and s its scores:

    dv = p g,  dp = g.v,  ds = p (dp - sum p dp),  dq = ds k / C,  dk = ds q / C

and, of the bias, which adds r.proj[:, d] to the score of the key at distance d:

    dr = sum_d ds[d] proj[:, d],  dproj[:, d] = sum over rows and heads of r ds[d].

Saved: the inputs; the weights are computed again. On a CPU by the loops of cpu.py (fp32 and bf16,
all gradients at once), else by blocks of rows, each against the keys that one of its rows may see.
"""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels import dispatch, exact
from suzuri.kernels.kept import kept
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.relative_attention.reference import EMPTY_MAX

ROWS = 64
"""Rows of a block. The keys that it is held against begin a whole number of blocks before it."""
SCORES_CPU, SCORES_GPU = 1 << 20, 1 << 26
"""Scores and biases held at once (some six times over), unless one block has more."""

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q_NHC: Tensor,
        k_NUC: Tensor,
        v_NUC: Tensor,
        r_NHB: Tensor,
        proj_BE: Tensor,
        seq_starts_S1: Tensor,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1)
        ctx.window = window
        return relative_attention(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1, window=window)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NHC: Tensor) -> tuple[Tensor | None, ...]:
        q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, starts_S1 = ctx.saved_tensors
        inputs = (q_NHC, k_NUC, v_NUC, r_NHB, proj_BE)
        needed = ctx.needs_input_grad[:5]
        if dispatch.use_cpu(*inputs):
            from suzuri.kernels.relative_attention import cpu

            grads = cpu.relative_attention_backward(*inputs, grad_NHC, starts_S1, ctx.window)
        else:
            grads = backward(*inputs, grad_NHC, starts_S1, ctx.window, needed)
        kept_grads = (x if is_needed else None for x, is_needed in zip(grads, needed, strict=True))
        return (*kept_grads, None, None)


def _block_reaches(starts_S1: Tensor, num_rows: int) -> list[int]:
    """For each block of ROWS packed rows the largest position of a row in it; -1: it has none."""
    reaches = [-1] * -(-num_rows // ROWS)
    for first, end in pairwise(starts_S1.tolist()):
        if end > first:
            for block in range(first // ROWS, (end - 1) // ROWS + 1):
                last = min(end, (block + 1) * ROWS) - 1
                reaches[block] = max(reaches[block], last - first)
    return reaches


def _chunks(backs: list[int], most: int) -> Iterator[tuple[int, int, int]]:
    """(first block, end, blocks of keys before each) of blocks that are worked on together: with at
    most `most` blocks of keys in all, of which at most half are there for the sake of another."""
    begin = 0
    while begin < len(backs):
        end, widest, own = begin, 0, 0
        while end < len(backs):
            wider = max(widest, backs[end] + 1)
            count, wanted = end + 1 - begin, own + max(backs[end] + 1, 1)
            if count > 1 and (wider * count > most or wider * count > 2 * wanted):
                break
            end, widest, own = end + 1, wider, wanted
        if widest:
            yield begin, end, widest - 1
        begin = end


def backward(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    grad_NHC: Tensor,
    seq_starts_S1: Tensor,
    window: int | None,
    needed: tuple[bool, ...],
) -> Grads:
    """Gradients of q, k, v, r (in their dtype) and of proj (at least fp32), where `needed`."""
    num_rows, heads, _ = q_NHC.shape
    reaches = kept(_block_reaches, seq_starts_S1, params=(num_rows,))
    backs = [-1 if x < 0 else -(-min(x, (window or x + 1) - 1) // ROWS) for x in reaches]
    before = max([*backs, 0]) * ROWS
    position_X = _positions(seq_starts_S1, len(backs) * ROWS)
    is_real_N11 = (position_X[:num_rows] >= 0)[:, None, None]

    def padded(x: Tensor, before: int) -> Tensor:
        """x in the arithmetic's dtype with rows of zeros around and for those of no sequence."""
        out = exact.widen(x).new_zeros((before + len(backs) * ROWS, *x.shape[1:]))
        out[before : before + num_rows] = torch.where(is_real_N11, x, 0.0)
        return out

    work = _Work(
        q=padded(q_NHC, 0) / q_NHC.shape[2],
        r=padded(r_NHB, 0),
        grad=padded(grad_NHC, 0),
        k=padded(k_NUC, before),
        v=padded(v_NUC, before),
        proj=exact.widen(proj_BE),
        position=position_X,
        before=before,
        window=window,
        needed=needed,
    )
    most = SCORES_CPU if q_NHC.device.type == "cpu" else SCORES_GPU
    for chunk in _chunks(backs, most // (2 * ROWS * ROWS * heads)):
        work.add(*chunk)
    rows, keys = slice(num_rows), slice(before, before + num_rows)
    return (
        (work.dq[rows] / q_NHC.shape[2]).to(q_NHC.dtype) if needed[0] else None,
        work.dk[keys].to(k_NUC.dtype) if needed[1] else None,
        work.dv[keys].to(v_NUC.dtype) if needed[2] else None,
        work.dr[rows].to(r_NHB.dtype) if needed[3] else None,
        work.dproj if needed[4] else None,
    )


def _positions(seq_starts_S1: Tensor, num_rows: int) -> Tensor:
    """The position of each row in its sequence, -1 where it has none."""
    row_X = torch.arange(num_rows, device=seq_starts_S1.device)
    sequence_X = torch.searchsorted(seq_starts_S1[1:].contiguous(), row_X, right=True)
    position_X = row_X - seq_starts_S1[sequence_X]
    is_real_X = (position_X >= 0) & (row_X < seq_starts_S1[-1])
    return torch.where(is_real_X, position_X, -1)


@dataclasses.dataclass(kw_only=True)
class _Work:
    """Padded inputs, and gradients into which every chunk of blocks writes or adds its own.

    Suffixes: X blocks of a chunk, T the ROWS of one, G query heads of a KV head, J the keys that a
    block is held against.
    """

    q: Tensor
    """Over C."""
    k: Tensor
    v: Tensor
    r: Tensor
    grad: Tensor
    proj: Tensor
    position: Tensor
    before: int
    """Rows of zeros before k and v."""
    window: int | None
    needed: tuple[bool, ...]

    def __post_init__(self) -> None:
        self.dq, self.dk, self.dv = map(torch.zeros_like, (self.q, self.k, self.v))
        self.dr, self.dproj = torch.zeros_like(self.r), torch.zeros_like(self.proj)

    def add(self, begin: int, end: int, back: int) -> None:
        """Blocks `begin` to `end`, each against its own keys and those of `back` blocks before."""
        count, rows = end - begin, slice(begin * ROWS, end * ROWS)
        need_q, need_k, need_v, need_r, need_proj = self.needed
        q, r, grad = (self._heads_first(x[rows], count) for x in (self.q, self.r, self.grad))
        first_key = self.before + (begin - back) * ROWS
        keys = slice(first_key, self.before + end * ROWS)
        k, v = (self._windows(x[keys], back) for x in (self.k, self.v))
        reach = min(self.proj.shape[1], (back + 1) * ROWS)
        proj = self.proj[:, :reach]
        p = self._scores(q, k, r, proj, rows, back)
        top = p.amax(-1, keepdim=True).clamp(min=EMPTY_MAX)
        p = p.sub_(top).exp()
        total = p.sum(-1, keepdim=True)
        p = p.div_(torch.where(total > 0, total, 1.0))
        if need_v:
            self._add_to_keys(self.dv, p, grad, first_key)
        if not (need_q or need_k or need_r or need_proj):
            return
        ds = torch.bmm(grad, v)
        ds = ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p)
        if need_q:
            self._write_rows(self.dq, torch.bmm(ds, k.mT), rows, count)
        if need_k:
            self._add_to_keys(self.dk, ds, q, first_key)
        if need_r or need_proj:
            # By distance: where the key at distance e of row t lies, j = back * ROWS + t - e.
            at_TE = self._shifted(back * ROWS, reach, ds.device)
            by_distance = ds.unflatten(1, (-1, ROWS))
            index = at_TE.clamp(min=0).expand(*by_distance.shape[:2], ROWS, reach)
            dbias = by_distance.gather(-1, index).masked_fill_(at_TE < 0, 0.0).flatten(1, 2)
            if need_r:
                self._write_rows(self.dr, torch.matmul(dbias, proj.T), rows, count)
            if need_proj:
                self.dproj[:, :reach] += torch.mm(r.flatten(0, 1).T, dbias.flatten(0, 1))

    def _scores(
        self, q: Tensor, k: Tensor, r: Tensor, proj: Tensor, rows: slice, back: int
    ) -> Tensor:
        """[X * U, G * T, J], -inf where a row may not look."""
        num_keys, reach = k.shape[-1], proj.shape[1]
        distance_TJ = self._shifted(back * ROWS, num_keys, q.device)
        bias = torch.matmul(r, proj).unflatten(1, (-1, ROWS))
        index = distance_TJ.clamp(min=0, max=reach - 1).expand(*bias.shape[:2], ROWS, num_keys)
        is_far = (distance_TJ < 0) | (distance_TJ >= reach)
        bias = bias.gather(-1, index).masked_fill_(is_far, 0.0).flatten(1, 2)
        score = torch.baddbmm(bias, q, k)
        count = len(self.position[rows]) // ROWS
        position_XT1 = self.position[rows].unflatten(0, (count, ROWS))[..., None]
        unseen_XTJ = (distance_TJ < 0) | (distance_TJ > position_XT1)
        if self.window is not None:
            unseen_XTJ = unseen_XTJ | (distance_TJ >= self.window)
        by_block = score.view(count, -1, ROWS, num_keys)
        return by_block.masked_fill_(unseen_XTJ[:, None], float("-inf")).view_as(score)

    def _shifted(self, start: int, width: int, device: torch.device) -> Tensor:
        """start + t - j, [ROWS, width]: the distance of key j, and the key at distance j."""
        row_T1 = torch.arange(start, start + ROWS, device=device)[:, None]
        return row_T1 - torch.arange(width, device=device)

    def _heads_first(self, x_NHC: Tensor, count: int) -> Tensor:
        """[X * U, G * T, C]"""
        kv_heads, width = self.k.shape[1], x_NHC.shape[2]
        x = x_NHC.reshape(count, ROWS, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        return x.reshape(count * kv_heads, -1, width)

    def _write_rows(self, out_NHC: Tensor, x: Tensor, rows: slice, count: int) -> None:
        """The way back from `_heads_first`."""
        kv_heads, width = self.k.shape[1], x.shape[2]
        x = x.reshape(count, kv_heads, -1, ROWS, width).permute(0, 3, 1, 2, 4)
        out_NHC[rows] = x.reshape(count * ROWS, -1, width)

    def _windows(self, x_NUC: Tensor, back: int) -> Tensor:
        """The keys of each block, [X * U, C, J]."""
        x_XUCJ = x_NUC.unfold(0, (back + 1) * ROWS, ROWS)  # exact: moves only
        return x_XUCJ.reshape(-1, *x_XUCJ.shape[2:])

    def _add_to_keys(self, out_NUC: Tensor, share: Tensor, x: Tensor, first_key: int) -> None:
        """out[key] += share of each row in it times the row of x; blocks of keys overlap, and are
        added one after the other."""
        kv_heads = out_NUC.shape[1]
        sums = torch.bmm(share.mT, x)
        sums_XJUC = sums.unflatten(0, (-1, kv_heads)).transpose(1, 2)
        count, num_keys = sums_XJUC.shape[:2]
        if count * ROWS <= num_keys:
            for block in range(count):
                start = first_key + block * ROWS
                out_NUC[start : start + num_keys] += sums_XJUC[block]
        else:
            for first in range(0, num_keys, ROWS):
                start = first_key + first
                out_XTUC = out_NUC[start : start + count * ROWS].unflatten(0, (count, ROWS))
                out_XTUC += sums_XJUC[:, first : first + ROWS]
