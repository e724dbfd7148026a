"""Every op of the forward as a function of the rows it is given, for the row-invariance tests."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels.draw_tokens import draw_tokens
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_sum import embedding_sum
from suzuri.kernels.filter_logits import filter_logits
from suzuri.kernels.gelu import gelu
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import matmul
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import moe_permute
from suzuri.kernels.paged_attention import paged_attention
from suzuri.kernels.penalize_logits import penalize_logits
from suzuri.kernels.philox import philox
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.router import router
from suzuri.kernels.sample_tokens import sample_tokens
from suzuri.kernels.short_conv import short_conv
from suzuri.kernels.swiglu import swiglu
from suzuri.kernels.token_logprobs import token_logprobs
from tests.kernels.compare import generator
from tests.kernels.rows import TOTAL, Outputs, RowOp

Layout = Callable[[Tensor], Tensor]


class Draw(NamedTuple):
    """Random inputs in one dtype, on one device, laid out in one way."""

    dtype: torch.dtype
    device: str
    layout: Layout

    def normal(self, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        x = scale * torch.randn(*shape, generator=generator(seed + sum(shape)))
        return self.layout(x.to(self.device, self.dtype))

    def integers(self, high: int, *shape: int, seed: int = 0) -> Tensor:
        g = generator(seed + high % 997)
        return torch.randint(high, shape, generator=g).to(self.device)

    def range(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)


def _num_rows(rows: slice) -> int:
    return rows.stop - rows.start


def _matmul(draw: Draw) -> RowOp:
    x, w = draw.normal(TOTAL, 129), draw.normal(211, 129)
    return lambda rows: (
        matmul(x[rows], w),
        matmul(x[rows], w, scale=1 / 24, out_dtype=torch.float32),
    )


def _embedding(draw: Draw) -> RowOp:
    ids, table = draw.integers(40, TOTAL), draw.normal(40, 17)
    return lambda rows: embedding(ids[rows], table)


def _embedding_sum(draw: Draw) -> RowOp:
    ids, table = draw.integers(60, TOTAL, 13), draw.normal(60, 31)
    return lambda rows: embedding_sum(ids[rows], table)


def _rms_norm(draw: Draw, width: int) -> RowOp:
    x, weight = draw.normal(TOTAL, width, scale=3.0), draw.normal(1, width)[0]
    return lambda rows: rms_norm(x[rows], weight, 1e-6)


def _head_norm(draw: Draw) -> RowOp:
    x, weight = draw.normal(TOTAL, 3, 45), draw.normal(1, 45)[0]
    return lambda rows: rms_norm(x[rows], weight, 1e-6)


def _short_conv(draw: Draw) -> RowOp:
    x, weight = draw.normal(TOTAL, 13), draw.normal(13, 4)

    def run(rows: slice) -> Tensor:
        positions = draw.range(TOTAL)[rows]
        starts = torch.tensor([0, _num_rows(rows)], device=draw.device)
        return short_conv(x[rows], weight, positions, torch.zeros_like(positions), starts)

    return run


def _short_conv_decode(draw: Draw) -> RowOp:
    """One new row of each of TOTAL sequences, each with its own state."""
    x, weight, state = draw.normal(TOTAL, 13), draw.normal(13, 4), draw.normal(TOTAL, 5, 13)
    positions = draw.integers(9, TOTAL)

    def run(rows: slice) -> Outputs:
        count, slots, states = _num_rows(rows), draw.range(TOTAL)[rows], state.clone()
        sequences = (positions[rows], draw.range(count), draw.range(count + 1))
        y = short_conv(x[rows], weight, *sequences, state_LRC=states, slots_S=slots)
        return y, states[rows]

    return run


def _log_scaling(draw: Draw) -> RowOp:
    x, positions = draw.normal(TOTAL, 3, 7), draw.integers(1 << 20, TOTAL)
    return lambda rows: log_scaling(x[rows], positions[rows], 4096, 0.1)


def _relative_attention(draw: Draw, window: int | None) -> RowOp:
    q = draw.normal(TOTAL, 4, 20, scale=4.0)
    k, v = draw.normal(TOTAL, 2, 20, seed=1), draw.normal(TOTAL, 2, 20, seed=2)
    r, proj = draw.normal(TOTAL, 4, 3), draw.normal(3, window or 11)

    def run(rows: slice) -> Tensor:
        starts = torch.tensor([0, _num_rows(rows)], device=draw.device)
        given = (q[rows], k[rows], v[rows], r[rows], proj, starts)
        return relative_attention(*given, window=window)

    return run


def _paged_attention(draw: Draw, window: int | None) -> RowOp:
    """One new row of each of TOTAL sequences of 1 to 90 tokens in shared pages."""
    q, r, proj = draw.normal(TOTAL, 4, 20, scale=4.0), draw.normal(TOTAL, 4, 3), draw.normal(3, 9)
    k, v = draw.normal(30, 16, 2, 20, seed=1), draw.normal(30, 16, 2, 20, seed=2)
    table, first = draw.integers(30, TOTAL, 6), draw.integers(90, TOTAL)

    def run(rows: slice) -> Tensor:
        starts = draw.range(_num_rows(rows) + 1)
        given = (q[rows], r[rows], proj, k, v, table[rows], first[rows], starts)
        return paged_attention(*given, window=window)

    return run


def _swiglu(draw: Draw, hidden: int) -> RowOp:
    x = draw.normal(TOTAL, 2 * hidden, scale=6.0)
    return lambda rows: swiglu(x[rows], out_dtype=draw.dtype)


def _gelu(draw: Draw, width: int) -> RowOp:
    x = draw.normal(TOTAL, width, scale=2.0)
    return lambda rows: gelu(x[rows])


def _router(draw: Draw) -> RowOp:
    x, weight = draw.normal(TOTAL, 45), draw.normal(39, 45, scale=0.3)
    bias = 0.1 * torch.randn(37, generator=generator(8)).to(draw.device)
    scale = torch.tensor([1.3], device=draw.device)
    return lambda rows: router(
        x[rows], weight, bias, scale, num_experts_per_token=6, route_scale=8.0
    )


def _experts(draw: Draw) -> RowOp:
    """Permute, both products, swiglu and combine: a token's experts see other tokens too."""
    x, weights = draw.normal(TOTAL, 45), torch.rand(TOTAL, 5, generator=generator(9))
    weights = weights.to(draw.device)
    experts = torch.rand(TOTAL, 11, generator=generator(10)).argsort(1)[:, :5].sort(1).values
    experts = experts.to(draw.device)
    w13, w2 = draw.normal(11, 26, 45, scale=0.2), draw.normal(11, 45, 13, scale=0.2)

    def run(rows: slice) -> Outputs:
        x_MD, permutation = moe_permute(x[rows], experts[rows], num_experts=11)
        gate_up = grouped_gemm(x_MD, w13, permutation.offsets_E1, out_dtype=torch.float32)
        hidden = swiglu(gate_up, out_dtype=draw.dtype)
        y_MD = grouped_gemm(hidden, w2, permutation.offsets_E1, out_dtype=draw.dtype)
        out = moe_combine(y_MD, permutation, weights[rows], out_dtype=draw.dtype)
        return out, y_MD[permutation.inverse_M].unflatten(0, (-1, 5))

    return run


def _log_softmax(draw: Draw, vocabulary: int) -> RowOp:
    logits = draw.normal(TOTAL, vocabulary, scale=3.0)
    logits[3::5, : vocabulary // 2] = -torch.inf
    return lambda rows: log_softmax(logits[rows])


def _token_logprobs(draw: Draw) -> RowOp:
    h, unembed = draw.normal(TOTAL, 33), draw.normal(2111, 33)
    targets, temperature = draw.integers(2111, TOTAL), 1.5 - 0.02 * draw.range(TOTAL)
    return lambda rows: (
        token_logprobs(h[rows], unembed, targets[rows], scale=1 / 24),
        token_logprobs(h[rows], unembed, targets[rows], scale=1.0, temperature_N=temperature[rows]),
    )


def _sample_tokens(draw: Draw) -> RowOp:
    logits, temperature = draw.normal(TOTAL, 301), 0.02 * draw.range(TOTAL)
    seeds, positions = draw.integers(1 << 62, TOTAL), draw.integers(1 << 20, TOTAL)
    samples = draw.integers(16, TOTAL)
    return lambda rows: sample_tokens(
        logits[rows], temperature[rows], seeds[rows], positions[rows], samples[rows]
    )


def _draw_tokens(draw: Draw) -> RowOp:
    h, unembed = draw.normal(TOTAL, 33), draw.normal(2111, 33)
    ask = Draws(
        0.02 * draw.range(TOTAL),
        draw.integers(1 << 62, TOTAL),
        draw.integers(1 << 20, TOTAL),
        draw.integers(16, TOTAL),
    )
    wants = draw.range(TOTAL) % 4

    def run(rows: slice) -> Outputs:
        given = (h[rows], unembed, Draws(*(x[rows] for x in ask)), wants[rows])
        ids, raw, sampled = draw_tokens(*given, scale=1 / 24)
        assert raw is not None
        assert sampled is not None
        return ids, raw, sampled

    return run


def _filter_logits(draw: Draw) -> RowOp:
    """Each row with filters of its own, some off; logits in eighths, so that many are equal."""
    logits = draw.layout((draw.normal(TOTAL, 301, scale=24.0).to(torch.int64) / 8).to(draw.dtype))
    top_k, place = draw.integers(200, TOTAL), draw.range(TOTAL)
    min_p = torch.where(place % 3 == 0, 0.0, 0.0005 * place)
    top_p = torch.where(place % 4 == 0, 1.0, 0.5 + 0.007 * place)
    return lambda rows: filter_logits(logits[rows], min_p[rows], top_k[rows], top_p[rows])


def _penalize_logits(draw: Draw) -> RowOp:
    logits, slots = draw.normal(TOTAL, 301), draw.integers(11, TOTAL)
    prompt, output = draw.integers(2, 11, 301) == 1, draw.integers(4, 11, 301).to(torch.int32)
    third = 0.01 * draw.range(TOTAL)
    return lambda rows: penalize_logits(
        logits[rows], prompt, output, slots[rows], 1 + third[rows], third[rows], -third[rows]
    )


def _philox(draw: Draw) -> RowOp:
    seed, c0 = draw.integers(1 << 62, TOTAL, 1), draw.integers(1 << 20, TOTAL, 1)
    columns = draw.range(75)[None]
    return lambda rows: philox(seed[rows], c0[rows], columns, columns[:, :1], c0[rows])


CAUSAL = {"short_conv", "relative_attention global", "relative_attention local"}
"""Rows of one sequence: a row may look at the rows before it."""

FORWARD_OPS: dict[str, Callable[[Draw], RowOp]] = {
    "matmul": _matmul,
    "embedding": _embedding,
    "embedding_sum": _embedding_sum,
    **{f"rms_norm {d}": lambda draw, d=d: _rms_norm(draw, d) for d in (1, 45, 64, 4099)},
    "rms_norm of heads": _head_norm,
    "short_conv": _short_conv,
    "short_conv decode": _short_conv_decode,
    "log_scaling": _log_scaling,
    "relative_attention global": lambda draw: _relative_attention(draw, None),
    "relative_attention local": lambda draw: _relative_attention(draw, 8),
    "paged_attention global": lambda draw: _paged_attention(draw, None),
    "paged_attention local": lambda draw: _paged_attention(draw, 9),
    **{f"swiglu {f}": lambda draw, f=f: _swiglu(draw, f) for f in (1, 13, 32, 129)},
    **{f"gelu {d}": lambda draw, d=d: _gelu(draw, d) for d in (1, 37, 64, 129)},
    "router": _router,
    "experts": _experts,
    "log_softmax 301": lambda draw: _log_softmax(draw, 301),
    "log_softmax 4099": lambda draw: _log_softmax(draw, 4099),
    "token_logprobs": _token_logprobs,
    "sample_tokens": _sample_tokens,
    "draw_tokens": _draw_tokens,
    "filter_logits": _filter_logits,
    "penalize_logits": _penalize_logits,
    "philox": _philox,
}
