"""The chunked head with a gradient, itself chunked: the logits of some ids at a time exist.

Saved: the inputs, a row's normaliser and its entropy. With p = exp(logit - normaliser) the gradient
of a logit is g at the target less p times the sum of the row's g; of the entropy H, with g the
gradient of H, it is -g p (logit - normaliser + H).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels.matmul.gradient import product
from suzuri.kernels.token_logprobs import statistics

MOST_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Gradients of logits that exist at one time: what stays in a cache (measured), and 128 MiB."""
LEAST_IDS, MOST_IDS = 256, 16384
"""Of one run."""


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        unembed_VD: Tensor,
        targets_NK: Tensor,
        scale: float,
        temperature_N: Tensor | None,
        with_entropy: bool,
        num_rows: int | None,
    ) -> tuple[Tensor, ...]:
        real_VD = unembed_VD[:num_rows]
        found = statistics(h_ND, real_VD, targets_NK, scale, temperature_N, with_entropy)
        logprobs_NK, normalizer_N, entropy_N = found
        ctx.save_for_backward(h_ND, unembed_VD, targets_NK, temperature_N, normalizer_N, entropy_N)
        ctx.scale, ctx.num_rows = scale, real_VD.shape[0]
        ctx.mark_non_differentiable(normalizer_N)
        ctx.set_materialize_grads(False)
        logprobs = (logprobs_NK, normalizer_N)
        return logprobs if entropy_N is None else (*logprobs, entropy_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h_ND, unembed_VD, targets_NK, temperature_N, normalizer_N, entropy_N = ctx.saved_tensors
        grad_NK, _, *rest = grads
        grad_entropy_N = rest[0] if rest else None
        if grad_NK is None and grad_entropy_N is None:
            return (None,) * 7
        needs_h, needs_unembed = ctx.needs_input_grad[:2]
        wide, vocabulary = normalizer_N.dtype, ctx.num_rows
        dtype, h_ND = h_ND.dtype, h_ND.to(wide) if h_ND.is_cpu else h_ND
        factor_N1 = torch.full_like(normalizer_N, ctx.scale)[:, None]
        if temperature_N is not None:
            factor_N1 = factor_N1 / temperature_N.to(wide)[:, None]
        grad_h = normalizer_N.new_zeros(h_ND.shape) if needs_h else None
        grad_unembed = normalizer_N.new_zeros(unembed_VD.shape) if needs_unembed else None
        run = ids_per_run(h_ND)
        for first in range(0, vocabulary if len(h_ND) else 0, run):
            rows_BD = unembed_VD[first : min(first + run, vocabulary)]
            logits_NB = product(h_ND, rows_BD.T).mul_(ctx.scale)
            if temperature_N is not None:
                logits_NB.div_(temperature_N.to(wide)[:, None])
            log_NB = logits_NB.sub_(normalizer_N[:, None])
            grad_NB = _grad_logits(
                log_NB, targets_NK - first, grad_NK, entropy_N, grad_entropy_N
            ).mul_(factor_N1)
            if grad_h is not None:
                grad_h += product(grad_NB, rows_BD)
            if grad_unembed is not None:
                grad_unembed[first : first + len(rows_BD)] = product(grad_NB.T, h_ND)
        grad_h = None if grad_h is None else grad_h.to(dtype)
        return grad_h, grad_unembed, None, None, None, None, None


def ids_per_run(h_ND: Tensor) -> int:
    most = MOST_LOGITS["cpu" if h_ND.is_cpu else "cuda"] // max(1, h_ND.shape[0])
    return max(LEAST_IDS, min(MOST_IDS, most))


def _grad_logits(
    log_NB: Tensor,
    places_NK: Tensor,
    grad_NK: Tensor | None,
    entropy_N: Tensor | None,
    grad_entropy_N: Tensor | None,
) -> Tensor:
    """Gradients of the logits of some ids from their log-probs, which may be overwritten; places
    outside of these ids are other chunks'."""
    of_entropy_N = None if entropy_N is None else grad_entropy_N
    share_NB = torch.exp(log_NB, out=log_NB if of_entropy_N is None else None)
    weight_N1 = share_NB.new_zeros(share_NB.shape[0], 1)
    if grad_NK is not None:
        weight_N1 = weight_N1 - grad_NK.sum(-1, keepdim=True)
    if entropy_N is None or of_entropy_N is None:
        found_NB = share_NB.mul_(weight_N1)
    else:
        weight_N1 = weight_N1 - (of_entropy_N * entropy_N)[:, None]
        found_NB = share_NB.mul_(log_NB.mul_(-of_entropy_N[:, None]).add_(weight_N1))
    if grad_NK is not None:
        # One target of every row at a time: no two are written to one place.
        for place_N, grad_N in zip(places_NK.unbind(1), grad_NK.unbind(1), strict=True):
            inside_N = (place_N >= 0) & (place_N < log_NB.shape[1])
            place_N1 = place_N.clamp(0, log_NB.shape[1] - 1)[:, None]
            added_N = torch.where(inside_N, grad_N, torch.zeros_like(grad_N))
            found_NB.scatter_(1, place_N1, found_NB.gather(1, place_N1) + added_N[:, None])
    return found_NB
