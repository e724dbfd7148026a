"""Log-probs of given next tokens straight from hidden states, without the [N, V] logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.token_logprobs import reference


class Statistics(NamedTuple):
    """Of the distribution of every row: log-probs of its K targets [N, K], log of the sum of
    exp(logits) [N], and the entropy [N] where it was asked for."""

    logprobs_NK: Tensor
    normalizer_N: Tensor
    entropy_N: Tensor | None


def token_logprobs(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    *,
    scale: float,
    temperature_N: Tensor | None = None,
    num_rows: int | None = None,
) -> Tensor:
    """log_softmax(h @ unembed^T * scale / temperature)[target] per row, in fp32 (at least).

    h_ND [N, D] after the final norm, unembed_VD [V, D] real vocabulary rows only (no padding), one
    dtype; targets_N int64 [N], or [N, K] for K log-probs of every row, in [0, V) (IndexError
    otherwise, on a GPU NaN, as raising would wait for it: leave out rows that have no target);
    scale = 1 / mup; temperature_N [N] > 0 or None for the raw log-prob. Returns the shape of the
    targets. Same bits as `log_softmax` of the whole logits: the same calls, chunk by chunk of 2048
    ids. With `num_rows` only so many rows of unembed exist (the rest is padding); a slice would do
    as well, but its gradient would be rounded to its dtype. The backward makes the logits of a
    chunk again and drops them. Gradients: h and unembed, the latter in fp32 at least.
    """
    found = _statistics(
        h_ND, unembed_VD, targets_N, scale, temperature_N, num_rows, with_entropy=False
    )
    return found.logprobs_NK.reshape(targets_N.shape)


def token_logprobs_and_entropy(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    *,
    scale: float,
    temperature_N: Tensor | None = None,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(`token_logprobs`, entropy [N] in nats of the distribution that they are of), in one pass
    over the vocabulary. The log-probs have the same bits. Gradients: h and unembed, of both."""
    found = _statistics(
        h_ND, unembed_VD, targets_N, scale, temperature_N, num_rows, with_entropy=True
    )
    assert found.entropy_N is not None
    return found.logprobs_NK.reshape(targets_N.shape), found.entropy_N


def _statistics(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_N: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    num_rows: int | None,
    *,
    with_entropy: bool,
) -> Statistics:
    if h_ND.dtype != unembed_VD.dtype:
        raise ValueError(f"token_logprobs: h is {h_ND.dtype}, unembed is {unembed_VD.dtype}")
    if targets_N.dim() not in (1, 2) or targets_N.shape[0] != h_ND.shape[0]:
        raise ValueError(
            f"token_logprobs: targets {list(targets_N.shape)} for {h_ND.shape[0]} rows; need [N] "
            "or [N, K]"
        )
    targets_NK = targets_N if targets_N.dim() == 2 else targets_N[:, None]
    given = (h_ND, unembed_VD, targets_NK, scale, temperature_N, with_entropy)
    if exact.records_gradient(h_ND, unembed_VD) and not dispatch.is_forced():
        from suzuri.kernels.token_logprobs import gradient

        logprobs_NK, normalizer_N, *rest = gradient.TokenLogprobs.apply(*given, num_rows)
        return Statistics(logprobs_NK, normalizer_N, rest[0] if rest else None)
    return statistics(h_ND, unembed_VD[:num_rows], *given[2:])


def statistics(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_NK: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    with_entropy: bool,
) -> Statistics:
    """What both functions above are made of, their arguments checked; no gradient on a GPU."""
    given = (h_ND, unembed_VD, targets_NK, scale, temperature_N, with_entropy)
    if dispatch.use_cpu(h_ND, unembed_VD):
        from suzuri.kernels.token_logprobs import cpu

        return Statistics(*cpu.statistics(*given))
    if dispatch.use_reference(h_ND):
        return Statistics(*reference.statistics(*given))
    if h_ND.device.type != "cuda" or h_ND.dtype not in (torch.bfloat16, torch.float32):
        raise dispatch.no_kernel("token_logprobs", h_ND)
    from suzuri.kernels.token_logprobs import kernel

    return Statistics(*kernel.statistics(*given))
