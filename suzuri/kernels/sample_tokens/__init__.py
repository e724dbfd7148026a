"""Draws one token per row: Gumbel argmax with counter-based noise, or plain argmax."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.sample_tokens import reference

PURPOSE_SAMPLE = 0
"""Counter word 2: what a random number is for, so that no two uses share noise."""


def sample_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sample_index_N: Tensor,
    *,
    purpose: int = PURPOSE_SAMPLE,
) -> Tensor:
    """ids [N] int64: argmax over v of logits / temperature + Gumbel noise, lowest id on ties.

    logits_NV [N, V] real vocabulary rows only, -inf where masked (never drawn); temperature_N [N]
    fp32 >= 0, where 0 means argmax of the logits without noise; seeds_N [N] int64; positions_N [N]
    position of the token being drawn; sample_index_N [N] index among the samples of one request.
    Noise of id v is word v mod 4 of Philox(key = seed, counter = (position, v // 4, purpose, sample
    index)), so that a row's draw depends on its own seed, position and logits alone. No gradients.
    A row without an answer (NaN among its logits, or every id masked) gives -1, never a wrong id.

    From a word x: u = (x + 1/2) / 2^32 in fp32; e = -ln(1 - u), an exponential with full relative
    precision near 0 (series below 2^-10), where the winners lie; Gumbel = -ln(e).
    """
    if dispatch.use_reference(logits_NV):
        return reference.sample_tokens(
            logits_NV, temperature_N, seeds_N, positions_N, sample_index_N, purpose
        )
    if logits_NV.device.type != "cuda":
        raise dispatch.no_kernel("sample_tokens", logits_NV)
    from suzuri.kernels.sample_tokens import kernel

    return kernel.sample_tokens(
        logits_NV, temperature_N, seeds_N, positions_N, sample_index_N, purpose
    )
