"""Head, chunked normaliser, the targets' logits and the entropy in one pass over the vocabulary."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import exact
from suzuri.kernels.log_softmax.reference import CHUNK, chunk_stats, fold, normalizer, start


def statistics(
    h_ND: Tensor,
    unembed_VD: Tensor,
    targets_NK: Tensor,
    scale: float,
    temperature_N: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    exact.check_indices(targets_NK, unembed_VD.shape[0], "target")
    wide = exact.at_least_fp32(h_ND.dtype)
    state = start(h_ND.to(wide))
    # Sum of exp(x - max) * (x - max): with it the mean logit, and so the entropy.
    moment_N = torch.zeros_like(state[1])
    target_NK = h_ND.new_zeros(targets_NK.shape, dtype=wide)

    def chunk(
        h: Tensor,
        rows: Tensor,
        most: Tensor,
        total: Tensor,
        moment: Tensor,
        target: Tensor,
        at: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits_NB = logits_of(exact.accumulate(h, rows), scale, temperature_N)
        chunk_max, chunk_sum, share_NB = chunk_stats(logits_NB)
        new = fold((most, total), chunk_max, chunk_sum)
        if with_entropy:
            own = exact.tree_sum(share_NB * (logits_NB - chunk_max[:, None]))
            lost, less = most - new[0], chunk_max - new[0]
            moment = exact.exp(lost) * (moment + lost * total)
            moment = moment + exact.exp(less) * (own + less * chunk_sum)
        columns: list[Tensor] = []
        for column_N, own_N in zip(targets_NK.unbind(1), target.unbind(1), strict=True):
            inside_N = (column_N >= at) & (column_N < at + rows.shape[0])
            place_N1 = (column_N - at).clamp(0, rows.shape[0] - 1)[:, None]
            found_N = exact.select(logits_NB, place_N1)[:, 0]
            columns.append(torch.where(inside_N, found_N, own_N))
        return *new, moment, torch.stack(columns, 1) if columns else target

    # One split, not a slice per chunk: the backward of each slice would be a whole weight of zeros.
    for number, rows_BD in enumerate(unembed_VD.split(CHUNK)):
        # Recomputed in the backward: a chunk's logits never outlive the chunk.
        *state, moment_N, target_NK = checkpoint(
            chunk, h_ND, rows_BD, *state, moment_N, target_NK, number * CHUNK, use_reentrant=False
        )
    most_N, total_N = state
    normalizer_N = normalizer((most_N, total_N))
    # log of the sum, less the mean logit: the max is in both and cancels.
    entropy_N = torch.log(total_N) - moment_N / total_N if with_entropy else None
    return target_NK - normalizer_N[:, None], normalizer_N, entropy_N


def logits_of(accumulators_NB: Tensor, scale: float, temperature_N: Tensor | None) -> Tensor:
    """The rounding steps from the head's accumulators (at least fp32) to logits."""
    logits_NB = accumulators_NB if scale == 1.0 else accumulators_NB * scale
    if temperature_N is not None:
        logits_NB = logits_NB / temperature_N.to(logits_NB.dtype)[:, None]
    return logits_NB
