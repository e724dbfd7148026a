"""Removes unlikely ids before a draw: min_p, top_k and top_p in one op."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.filter_logits import reference


def filter_logits(logits_NV: Tensor, min_p_N: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """The logits [N, V] with -inf for every id that the row's filters remove; kept ids keep their
    bits. Row by row, in the (at least fp32) dtype of the logits; no gradients.

    logits_NV [N, V], divided by the temperature, -inf where masked; min_p_N, top_p_N [N] fp32 in
    [0, 1]; top_k_N [N] int64, below 1 for off. A row with min_p 0, top_k off and top_p 1 is
    returned bit for bit. Ids are ordered by logit, the lower id first on ties, and each filter cuts
    the end of what the one before left:
    1. min_p keeps logit - max >= ln(min_p), in fp32 (fp64 for fp64).
    2. top_k keeps k ids.
    3. top_p weighs id i by the integer w_i = floor(exp(logit - max) * 2^40) and keeps it while the
       weights before it sum to less than floor(top_p * total), product in fp64, total over the ids
       that 1 and 2 kept. So it keeps the fewest ids whose share reaches top_p.
    At least one id stays. A row with NaN or without any id that is not masked gives a row for which
    `sample_tokens` returns -1. V is at most 2^22, so that integers cannot overflow.
    """
    if logits_NV.shape[1] > reference.MOST_IDS:
        raise ValueError(
            f"filter_logits: {logits_NV.shape[1]} ids per row; at most {reference.MOST_IDS}"
        )
    if dispatch.use_reference(logits_NV):
        return reference.filter_logits(logits_NV, min_p_N, top_k_N, top_p_N)
    if logits_NV.device.type != "cuda":
        raise dispatch.no_kernel("filter_logits", logits_NV)
    from suzuri.kernels.filter_logits import kernel

    return kernel.filter_logits(logits_NV, min_p_N, top_k_N, top_p_N)
