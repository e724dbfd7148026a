"""What the rows of a step ask of the sampler: gathered on the host, copied to the device at once.

`Part` is the idea: a feature is a list of the rows that use it and their values, so that nobody
else pays for it. The lists stay on the host as well, which makes every shape known there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from suzuri.engine.sampling_params import ResolvedSampling
from suzuri.engine.transfers import upload
from suzuri.kernels.draw_tokens import RAW, SAMPLED
from suzuri.kernels.draw_tokens.draws import Draws

ALIGNMENT = 16
"""Bytes: Triton compiles a kernel once for pointers that are multiples of it, and once more for
others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowState:
    """One row to sample, on the host.

    position: of the token to be drawn, in its sequence, prompt included; num_output: tokens of the
    output before it; slot: what `SamplingTables.acquire` gave the sequence.
    """

    sampling: ResolvedSampling
    seed: int
    position: int
    num_output: int
    sample_index: int = 0
    slot: int = -1
    mask: bytes | None = None
    """A bit per row of the vocabulary that may be drawn, the lowest bit of a byte first; None for
    all."""


class Part(NamedTuple):
    """Rows that use one feature, ascending (a row may come more than once), and their values [M].

    `places` on the host and `rows_M` on the device are the same row numbers.
    """

    places: list[int]
    rows_M: Tensor
    values: tuple[Tensor, ...]

    def within(self, start: int, stop: int) -> "Part | None":
        """The part of the rows start .. stop - 1, numbered from there; None if it is empty."""
        first, end = bisect_left(self.places, start), bisect_left(self.places, stop)
        if first == end:
            return None
        values = tuple(_aligned(value_M[first:end]) for value_M in self.values)
        return Part(self.places[first:end], self.rows_M[first:end] - start, values)


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """What the S rows of a step ask for, on the device; features that no row uses are None.

    temperature_S [S] fp32: divisor of the logits (1 for greedy rows), None if all are 1;
    noise_S [S] fp32: 1 where the draw has noise, 0 where it is greedy. Parts and their values:
    random (seed, position, sample index), the rows that are not greedy; bias (slot); allowed (mask
    [M, V] bool, True for what may be drawn); penalties
    (slot, repetition, frequency, presence); stops (column), one entry per masked stop id; filters
    (min_p, top_k, top_p); raw and sampled (none), the rows that want those log-probs.
    """

    num_rows: int
    temperature_S: Tensor | None
    noise_S: Tensor
    random: Part | None
    bias: Part | None
    allowed: Part | None
    penalties: Part | None
    stops: Part | None
    filters: Part | None
    raw: Part | None
    sampled: Part | None
    raw_top: int
    """Most alternatives that a row asks for, here and among the sampled log-probs."""
    sampled_top: int


@dataclass(frozen=True, kw_only=True)
class DirectRows:
    """M rows that `draw_tokens` draws without their logits: a temperature or none, and log-probs of
    the drawn id alone. rows_M: their numbers in the step, None for all of them; draws: None where
    all are greedy; wants_M: bits of the log-probs, None where nobody asks."""

    rows_M: Tensor | None
    draws: Draws | None
    wants_M: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The S rows of a step by how they are drawn. `sliced`: what those ask for that need logits,
    numbered from 0, and sliced_M their numbers in the step (None for all of them); `direct`: the
    others. raw and sampled: whether any row asks for those log-probs."""

    num_rows: int
    direct: DirectRows | None
    sliced: RowParams | None = None
    sliced_M: Tensor | None = None
    raw: bool = False
    sampled: bool = False


def greedy(num_rows: int) -> StepRows:
    """Rows that want their most likely id and nothing else."""
    return StepRows(num_rows=num_rows, direct=DirectRows(rows_M=None, draws=None, wants_M=None))


def split(states: Sequence[RowState], device: torch.device, num_ids: int) -> StepRows:
    """The rows of a step, each drawn the cheapest way; errors as of `build`. Which way it is
    changes no bit."""
    direct = [place for place, state in enumerate(states) if is_direct(state)]
    chosen = {*direct}
    others = [place for place in range(len(states)) if place not in chosen]
    params = [state.sampling.params for state in states]
    return StepRows(
        num_rows=len(states),
        direct=_direct(states, direct, device) if direct or not others else None,
        sliced=build([states[place] for place in others], device, num_ids) if others else None,
        sliced_M=upload(others, device) if direct and others else None,
        raw=any(p.logprobs is not None for p in params),
        sampled=any(p.sampled_logprobs for p in params),
    )


def is_direct(state: RowState) -> bool:
    """Whether a row needs no look at its logits besides the draw and its log-probs."""
    sampling, params = state.sampling, state.sampling.params
    masks_stops = state.num_output < params.min_tokens and bool(sampling.stop_rows)
    looks = sampling.needs_slot or params.has_filters or masks_stops or bool(params.logprobs)
    return not looks and state.mask is None


def _direct(states: Sequence[RowState], places: Sequence[int], device: torch.device) -> DirectRows:
    rows = [states[place] for place in places]
    params = [row.sampling.params for row in rows]
    wants = [RAW * (p.logprobs is not None) + SAMPLED * p.sampled_logprobs for p in params]
    is_noisy = not all(p.is_greedy for p in params)
    columns = [
        [] if len(places) == len(states) else places,
        wants if any(wants) else [],
        *([row.seed for row in rows], [row.position for row in rows]),
        [row.sample_index for row in rows],
    ]
    if not is_noisy:
        columns = columns[:2]
    rows_M, wants_M, *counters = _upload(columns, torch.int64, device)
    draws = None
    if is_noisy:
        temperature = [0.0 if p.is_greedy else p.temperature for p in params]
        draws = Draws(upload(temperature, device, torch.float32), *counters)
    return DirectRows(
        rows_M=rows_M if len(places) < len(states) else None,
        draws=draws,
        wants_M=wants_M if any(wants) else None,
    )


@cache
def plain(num_rows: int, device: torch.device) -> RowParams:
    """Rows that want their most likely id and nothing else: made once."""
    return RowParams(
        num_rows=num_rows,
        temperature_S=None,
        noise_S=torch.zeros(num_rows, device=device),
        random=None,
        bias=None,
        allowed=None,
        penalties=None,
        stops=None,
        filters=None,
        raw=None,
        sampled=None,
        raw_top=0,
        sampled_top=0,
    )


def build(states: Sequence[RowState], device: torch.device, num_ids: int) -> RowParams:
    """The device's view of these rows of num_ids logits. Raises ValueError for a row that needs a
    slot of the tables and has none."""
    if all(state.sampling.is_plain and state.mask is None for state in states):
        return plain(len(states), device)
    params = [state.sampling.params for state in states]
    for place, state in enumerate(states):
        if state.slot < 0 and state.sampling.needs_slot:
            raise ValueError(f"row {place} has a bias or penalties and no slot of the tables")
    bias = [place for place, state in enumerate(states) if state.sampling.has_bias]
    penalties = [place for place, p in enumerate(params) if p.has_penalties]
    filters = [place for place, p in enumerate(params) if p.has_filters]
    stops = [
        (place, row)
        for place, state in enumerate(states)
        if state.num_output < params[place].min_tokens
        for row in state.sampling.stop_rows
    ]
    raw = [place for place, p in enumerate(params) if p.logprobs is not None]
    sampled = [place for place, p in enumerate(params) if p.sampled_logprobs]
    random = [place for place, p in enumerate(params) if not p.is_greedy]
    places = [random, bias, penalties, [place for place, _ in stops], filters, raw, sampled]
    whole = _upload(
        [
            *places,
            [states[place].seed for place in random],
            [states[place].position for place in random],
            [states[place].sample_index for place in random],
            [states[place].slot for place in bias],
            [states[place].slot for place in penalties],
            [row for _, row in stops],
            [params[place].top_k for place in filters],
        ],
        torch.int64,
        device,
    )
    real = _upload(
        [
            [1.0 if p.is_greedy else p.temperature for p in params],
            [0.0 if p.is_greedy else 1.0 for p in params],
            [params[place].repetition_penalty for place in penalties],
            [params[place].frequency_penalty for place in penalties],
            [params[place].presence_penalty for place in penalties],
            [params[place].min_p for place in filters],
            [params[place].top_p for place in filters],
        ],
        torch.float32,
        device,
    )
    bias_slots, penalty_slots, stop_columns, top_k = whole[10:]
    values = [tuple(whole[7:10]), (bias_slots,), (penalty_slots, *real[2:5]), (stop_columns,)]
    values += [(real[5], top_k, real[6]), (), ()]
    parts = [
        Part(rows, rows_M, value) if rows else None
        for rows, rows_M, value in zip(places, whole[:7], values, strict=True)
    ]
    return RowParams(
        num_rows=len(states),
        temperature_S=real[0]
        if any(not p.is_greedy and p.temperature != 1 for p in params)
        else None,
        noise_S=real[1],
        random=parts[0],
        bias=parts[1],
        allowed=_allowed(states, device, num_ids),
        penalties=parts[2],
        stops=parts[3],
        filters=parts[4],
        raw=parts[5],
        sampled=parts[6],
        raw_top=max((params[place].logprobs or 0 for place in raw), default=0),
        sampled_top=max((params[place].logprobs or 0 for place in sampled), default=0),
    )


def _allowed(states: Sequence[RowState], device: torch.device, num_ids: int) -> Part | None:
    """The masks of those rows that have one. Rows that a mask does not reach are not allowed."""
    places = [place for place, state in enumerate(states) if state.mask is not None]
    if not places:
        return None
    masks_MV = np.zeros((len(places), num_ids), np.bool_)
    for row_V, place in zip(masks_MV, places, strict=True):
        bits = np.frombuffer(states[place].mask or b"", np.uint8)
        count = min(num_ids, 8 * len(bits))
        row_V[:count] = np.unpackbits(bits, count=count, bitorder="little")
    mask_MV = torch.as_tensor(masks_MV)
    if device.type == "cuda":
        mask_MV = mask_MV.pin_memory()
    moved_MV = mask_MV.to(device, non_blocking=True)
    return Part(places, upload(places, device), (moved_MV,))


def _upload(
    columns: Sequence[Sequence[int | float]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Each column as a tensor on the device, all in one copy."""
    # Each begins on an ALIGNMENT, whatever is before it: kernels are compiled for where they do.
    step = ALIGNMENT // dtype.itemsize
    places: list[int] = []
    values: list[int | float] = []
    for column in columns:
        places.append(len(values))
        values += [*column, *(0,) * (-len(column) % step)]
    joined = upload(values, device, dtype)
    return [joined[i : i + len(column)] for i, column in zip(places, columns, strict=True)]


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
