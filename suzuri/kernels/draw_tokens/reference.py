"""Head, noise, first maximum and chunked normalisers in one pass over the vocabulary; the pieces
are those of sample_tokens and log_softmax."""

import math

import torch
from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.draw_tokens.slices import CHUNK, slices
from suzuri.kernels.log_softmax.reference import chunk_stats, fold, normalizer, start
from suzuri.kernels.sample_tokens.reference import gumbel
from suzuri.kernels.token_logprobs.reference import logits_of


def draw_tokens(
    h_ND: Tensor,
    unembed_VD: Tensor,
    draws: Draws | None,
    wants_N: Tensor | None,
    scale: float,
    purpose: int,
    width: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, vocabulary = h_ND.shape[0], unembed_VD.shape[0]
    none_N1 = h_ND.new_full((rows, 1), -math.inf, dtype=exact.at_least_fp32(h_ND.dtype))
    # The best score so far, its id and logit; the largest logit, NaN if there is one.
    best_N = own_N = peak_N = none_N1[:, 0]
    ids_N = torch.full((rows,), -1, dtype=torch.int64, device=h_ND.device)
    raw, sampled = start(none_N1), start(none_N1)
    for first, end in slices(rows, vocabulary, width):
        logits_NB = logits_of(exact.accumulate(h_ND, unembed_VD[first:end]), scale, None)
        tempered_NB = over_temperature(logits_NB, draws)
        score_NB = tempered_NB
        if draws is not None:
            temperature_N, seeds_N, positions_N, samples_N = draws
            noise_NB = gumbel(seeds_N, positions_N, samples_N, purpose, end - first, first=first)
            noise_NB = torch.where(temperature_N[:, None] > 0, noise_NB, 0.0)
            score_NB = score_NB + noise_NB.to(logits_NB.dtype)
        most_N1 = score_NB.amax(-1, keepdim=True)
        place_B = torch.arange(end - first, device=h_ND.device)
        place_N = torch.where(score_NB == most_N1, place_B, end - first).amin(-1)
        logit_N1 = exact.select(logits_NB, place_N.clamp(max=end - first - 1)[:, None])
        # Only a larger score replaces an earlier one: ties go to the lowest id.
        better_N = most_N1[:, 0] > best_N
        best_N = torch.where(better_N, most_N1[:, 0], best_N)
        ids_N = torch.where(better_N, first + place_N, ids_N)
        own_N = torch.where(better_N, logit_N1[:, 0], own_N)
        peak_N = torch.maximum(peak_N, logits_NB.amax(-1))
        if wants_N is not None:
            raw, sampled = _folded(raw, logits_NB), _folded(sampled, tempered_NB)
    sound_N = (peak_N > -math.inf) & (peak_N < math.inf) & (best_N > -math.inf)
    ids_N = torch.where(sound_N, ids_N, -1)
    if wants_N is None:
        return ids_N, None, None
    raw_N = own_N - normalizer(raw)
    sampled_N = torch.zeros_like(raw_N)
    if draws is not None:
        tempered_N = over_temperature(own_N[:, None], draws)[:, 0]
        sampled_N = torch.where(draws[0] > 0, tempered_N - normalizer(sampled), 0.0)
    raw_N, sampled_N = (
        torch.where(sound_N & (wants_N // bit % 2 > 0), x_N, math.nan)
        for bit, x_N in ((1, raw_N), (2, sampled_N))
    )
    return ids_N, raw_N, sampled_N


def over_temperature(logits_NB: Tensor, draws: Draws | None) -> Tensor:
    """The logits over the temperature of rows with noise; of the others as they are."""
    if draws is None:
        return logits_NB
    temperature_N = draws[0]
    divisor_N = torch.where(temperature_N > 0, temperature_N, 1.0)
    return logits_NB / divisor_N.to(logits_NB.dtype)[:, None]


def _folded(state: tuple[Tensor, Tensor], x_NB: Tensor) -> tuple[Tensor, Tensor]:
    """The state of log_softmax's normaliser with the chunks of a slice folded in."""
    for begin in range(0, x_NB.shape[1], CHUNK):
        chunk_max, chunk_sum, _ = chunk_stats(x_NB[:, begin : begin + CHUNK])
        state = fold(state, chunk_max, chunk_sum)
    return state
