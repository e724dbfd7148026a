"""Draws the next token of every row of a step, and the log-probs that were asked for.

Read `Sampler.draw` first, then `Sampler.sample`: the order of docs/engine.md, section Sampling. A
row that asks for a temperature or nothing is drawn without its logits (draw_tokens); those of the
others are made SLICE rows at a time, so that [rows, V] and its copies do not grow with the batch,
and a feature runs on the rows that use it alone. What a row needs beyond its logits comes from
sampling_rows.py; nothing between the hidden rows and the result waits for the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.engine.sampling_rows import Part, RowParams, RowState, StepRows, build, split
from suzuri.engine.sampling_tables import SamplingTables
from suzuri.kernels import dispatch, exact
from suzuri.kernels.draw_tokens import draw_tokens
from suzuri.kernels.filter_logits import filter_logits
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import matmul
from suzuri.kernels.sample_tokens import sample_tokens

SLICE = 32


class Scores(NamedTuple):
    """Log-probs [S] of one id per row, and the ids and log-probs [S, K] of the row's most likely
    ones, largest first, ties to the lower id; -inf is an id that cannot be drawn. A row that did
    not ask has NaN and ids -1; so has a row with fewer than K ids behind its last one, and may have
    one that asked for fewer than K behind those."""

    logprob_S: Tensor
    top_ids_SK: Tensor
    top_SK: Tensor


class Sampled(NamedTuple):
    """ids_S [S] int64 model rows. -1: the row has no answer (NaN or infinity among its logits, or
    every id masked), and its request must end with an error; its log-probs are NaN.

    raw, sampled: see Scores; None where no row asked.
    """

    ids_S: Tensor
    raw: Scores | None
    sampled: Scores | None


class Sampler:
    """Sampling for a model with `num_ids` real logits per row (V); `max_slots` sequences may use
    penalties, a bias or allowed ids at one time."""

    def __init__(self, *, num_ids: int, max_slots: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.tables = SamplingTables(num_ids=num_ids, max_slots=max_slots, device=self.device)

    def rows(self, states: Sequence[RowState]) -> RowParams:
        """The device's view of these rows. Raises ValueError for a row that needs a slot and has
        none."""
        return build(states, self.device, self.tables.num_ids)

    def step(self, states: Sequence[RowState]) -> StepRows:
        """As `rows`, each row by the way that `draw` goes."""
        return split(states, self.device, self.tables.num_ids)

    def draw(self, h_SD: Tensor, unembed_VD: Tensor, scale: float, rows: StepRows) -> Sampled:
        """Draws one id per hidden row h_SD [S, D] and counts it for the penalties of its sequence.

        unembed_VD: the head's rows, real ones first (padding behind is left out), in the dtype of
        h; scale multiplies their products. A row has the bits that `sample` gives its logits,
        however it is drawn and whatever the other rows ask for.
        """
        if h_SD.shape[0] != rows.num_rows:
            raise ValueError(f"{h_SD.shape[0]} hidden rows; expected {rows.num_rows}")
        unembed_VD = unembed_VD[: self.tables.num_ids]
        with dispatch.threads_for(h_SD.numel() + unembed_VD.numel(), h_SD.device):
            parts: list[tuple[Tensor | None, Sampled]] = []
            if rows.direct is not None:
                parts.append(self._drawn(h_SD, unembed_VD, scale, rows))
            if rows.sliced is not None:
                parts.append(self._drawn_by_logits(h_SD, unembed_VD, scale, rows))
            return parts[0][1] if len(parts) == 1 else _joined(parts, rows)

    def _drawn(
        self, h_SD: Tensor, unembed_VD: Tensor, scale: float, rows: StepRows
    ) -> tuple[Tensor | None, Sampled]:
        direct = rows.direct
        assert direct is not None
        h_MD = h_SD if direct.rows_M is None else h_SD.index_select(0, direct.rows_M)
        ids_M, raw_M, sampled_M = draw_tokens(
            h_MD, unembed_VD, direct.draws, direct.wants_M, scale=scale
        )
        raw = None if raw_M is None or not rows.raw else _own(raw_M)
        sampled = None if sampled_M is None or not rows.sampled else _own(sampled_M)
        return direct.rows_M, Sampled(ids_M, raw, sampled)

    def _drawn_by_logits(
        self, h_SD: Tensor, unembed_VD: Tensor, scale: float, rows: StepRows
    ) -> tuple[Tensor | None, Sampled]:
        params = rows.sliced
        assert params is not None
        h_MD = h_SD if rows.sliced_M is None else h_SD.index_select(0, rows.sliced_M)
        wide = exact.at_least_fp32(h_SD.dtype)

        def logits_of(start: int, stop: int) -> Tensor:
            return matmul(h_MD[start:stop], unembed_VD, scale=scale, out_dtype=wide)

        found = self._sampled(logits_of, params)
        self.count(params, found.ids_S)
        return rows.sliced_M, found

    def sample(self, logits_SV: Tensor, rows: RowParams) -> Sampled:
        """Draws one id per row of logits_SV [S, V] (real rows only, untouched by this).

        A row's result is a function of its own logits, parameters and table rows: not of S, the
        order, or the other rows.
        """
        if logits_SV.shape != (rows.num_rows, self.tables.num_ids):
            raise ValueError(
                f"logits are {list(logits_SV.shape)}; expected {rows.num_rows} rows of "
                f"{self.tables.num_ids}"
            )
        return self._sampled(lambda start, stop: logits_SV[start:stop], rows)

    def _sampled(self, logits_of: Callable[[int, int], Tensor], rows: RowParams) -> Sampled:
        """`sample` of the logits [N, V] of rows start .. stop - 1, asked for slice by slice."""
        ids: list[Tensor] = []
        raw: list[Scores] = []
        sampled: list[Scores] = []
        for start in range(0, rows.num_rows, SLICE):
            stop = min(start + SLICE, rows.num_rows)
            found = self._slice(logits_of(start, stop), rows, start, stop)
            ids.append(found.ids_S)
            raw += [found.raw] if found.raw else []
            sampled += [found.sampled] if found.sampled else []
        if not ids:
            ids = [torch.empty(0, dtype=torch.int64, device=self.device)]
        return Sampled(torch.cat(ids), _cat(raw), _cat(sampled))

    def _slice(self, logits_NV: Tensor, rows: RowParams, start: int, stop: int) -> Sampled:
        final_NV = self._final_logits(logits_NV, rows, start, stop)
        ids_N = _draw(logits_NV, final_NV, rows, start, stop)
        raw = sampled = None
        if rows.raw is not None:
            raw = _scores(logits_NV, ids_N, rows.raw.within(start, stop), rows.raw_top)
        if rows.sampled is not None:
            part = rows.sampled.within(start, stop)
            drawn_NV = _point_mass(final_NV, ids_N, rows.noise_S[start:stop])
            sampled = _scores(drawn_NV, ids_N, part, rows.sampled_top)
        return Sampled(ids_N, raw, sampled)

    def count(self, rows: RowParams, ids_S: Tensor) -> None:
        """Adds sampled ids [S] to the output counts of their sequences, on the device: call it with
        the result of `sample` before the next step's. Ids of -1 are left out."""
        part = rows.penalties
        if part is not None:
            self.tables.add(part.values[0], ids_S.index_select(0, part.rows_M))

    def _final_logits(self, logits_NV: Tensor, rows: RowParams, start: int, stop: int) -> Tensor:
        """The logits whose softmax the slice's rows are drawn from (greedy rows: whose largest)."""
        x_NV = exact.widen(logits_NV)
        if rows.bias and (part := rows.bias.within(start, stop)):
            x_NV = _apply(x_NV, part, self.tables.biased)
        if rows.allowed and (part := rows.allowed.within(start, stop)):
            x_NV = _apply(x_NV, part, _masked)
        if rows.penalties and (part := rows.penalties.within(start, stop)):
            x_NV = _apply(x_NV, part, self.tables.penalized)
        if rows.stops and (part := rows.stops.within(start, stop)):
            masked = x_NV.new_full((), -math.inf)
            x_NV = x_NV.index_put((part.rows_M, part.values[0]), masked)
        if rows.temperature_S is not None:
            x_NV = x_NV / rows.temperature_S[start:stop, None].to(x_NV.dtype)
        if rows.filters and (part := rows.filters.within(start, stop)):
            x_NV = _apply(x_NV, part, filter_logits)
        return x_NV


def score(logits_NV: Tensor, targets_N: Tensor, top: int) -> Scores:
    """Raw log-probs of given ids and of the `top` most likely: what `sample` reports as raw, with
    the same bits, for the tokens of a prompt. targets_N [N] int64 in [0, V)."""
    parts = [
        _scores_of(logits_NV[i : i + SLICE], targets_N[i : i + SLICE], top)
        for i in range(0, logits_NV.shape[0], SLICE)
    ]
    joined = _cat(parts)
    return joined or _unasked(logits_NV, top)


def _own(logprob_M: Tensor) -> Scores:
    """Log-probs of the drawn ids, and no others."""
    none_M0 = logprob_M.new_empty(logprob_M.shape[0], 0)
    return Scores(logprob_M, none_M0.to(torch.int64), none_M0)


def _joined(parts: Sequence[tuple[Tensor | None, Sampled]], rows: StepRows) -> Sampled:
    """The parts of a step in the order of its rows; what a part did not ask for is NaN and -1."""
    ids_S = parts[0][1].ids_S.new_empty(rows.num_rows)
    for rows_M, part in parts:
        assert rows_M is not None
        ids_S.index_copy_(0, rows_M, part.ids_S)
    raw = [(rows_M, part.raw) for rows_M, part in parts]
    sampled = [(rows_M, part.sampled) for rows_M, part in parts]
    return Sampled(ids_S, _joined_scores(raw, rows), _joined_scores(sampled, rows))


def _joined_scores(
    parts: Sequence[tuple[Tensor | None, Scores | None]], rows: StepRows
) -> Scores | None:
    found = [(rows_M, scores) for rows_M, scores in parts if scores is not None]
    if not found:
        return None
    top = max(scores.top_SK.shape[1] for _, scores in found)
    whole = _unasked(found[0][1].logprob_S, top, rows.num_rows)
    for rows_M, scores in found:
        assert rows_M is not None
        whole.logprob_S.index_copy_(0, rows_M, scores.logprob_S)
        if scores.top_SK.shape[1]:
            whole.top_ids_SK.index_copy_(0, rows_M, scores.top_ids_SK)
            whole.top_SK.index_copy_(0, rows_M, scores.top_SK)
    return whole


def _apply(x_NV: Tensor, part: Part, op: Callable[..., Tensor]) -> Tensor:
    """x with `op` done to the rows of the part."""
    if len(part.places) == x_NV.shape[0]:
        return op(x_NV, *part.values)
    return x_NV.index_copy(0, part.rows_M, op(x_NV.index_select(0, part.rows_M), *part.values))


def _masked(x_MV: Tensor, mask_MV: Tensor) -> Tensor:
    return torch.where(mask_MV, x_MV, -math.inf)


def _draw(logits_NV: Tensor, final_NV: Tensor, rows: RowParams, start: int, stop: int) -> Tensor:
    """ids [N], -1 also where a mask hides a logit that is no number: the model is broken there."""
    part = rows.random.within(start, stop) if rows.random else None
    if part is None:
        ids_N = _largest(final_NV)
    elif len(part.places) == stop - start:
        ids_N = sample_tokens(final_NV, rows.noise_S[start:stop], *part.values)
    else:
        ids_N = _largest(final_NV)
        some_MV = final_NV.index_select(0, part.rows_M)
        noise_M = rows.noise_S[start:stop].index_select(0, part.rows_M)
        ids_N = ids_N.index_copy(0, part.rows_M, sample_tokens(some_MV, noise_M, *part.values))
    most_N = logits_NV.amax(-1)
    sound_N = (most_N > -math.inf) & (most_N < math.inf)
    return torch.where(sound_N, ids_N, -1)


def _largest(x_NV: Tensor) -> Tensor:
    """What `sample_tokens` draws at temperature 0, without making noise first."""
    most_N1 = x_NV.amax(-1, keepdim=True)
    id_V = torch.arange(x_NV.shape[1], device=x_NV.device)
    first_N = torch.where(x_NV == most_N1, id_V, x_NV.shape[1]).amin(-1)
    return torch.where(most_N1[:, 0] > -math.inf, first_N, -1)


def _point_mass(final_NV: Tensor, ids_N: Tensor, noise_N: Tensor) -> Tensor:
    """Greedy rows draw their id with probability 1; the others as they are."""
    id_V = torch.arange(final_NV.shape[1], device=final_NV.device)
    possible_NV = (noise_N > 0)[:, None] | (id_V == ids_N[:, None])
    return torch.where(possible_NV, final_NV, -math.inf)


def _scores(x_NV: Tensor, ids_N: Tensor, part: Part | None, top: int) -> Scores:
    """Scores of a slice, of which the rows of `part` asked."""
    if part is None:
        return _unasked(x_NV, top)
    if len(part.places) == x_NV.shape[0]:
        return _scores_of(x_NV, ids_N, top)
    rows_M = part.rows_M
    some = _scores_of(x_NV.index_select(0, rows_M), ids_N.index_select(0, rows_M), top)
    everyone = _unasked(x_NV, top)
    return Scores(
        *(of_N.index_copy(0, rows_M, of_M) for of_N, of_M in zip(everyone, some, strict=True))
    )


def _scores_of(x_MV: Tensor, ids_M: Tensor, top: int) -> Scores:
    logprob_MV = log_softmax(x_MV)
    found_M = ids_M >= 0
    own_M = exact.select(logprob_MV, ids_M.clamp(min=0)[:, None])[:, 0]
    own_M = torch.where(found_M, own_M, math.nan)
    if top == 0:
        none_M0 = ids_M.new_empty(ids_M.shape[0], 0)
        return Scores(own_M, none_M0, none_M0.to(logprob_MV.dtype))
    top_ids_MK = exact.top_k(logprob_MV, top)
    top_MK = exact.select(logprob_MV, top_ids_MK)
    top_MK = torch.where(found_M[:, None], top_MK, math.nan)
    top_ids_MK = torch.where(found_M[:, None], top_ids_MK, -1)
    lacking = top - top_ids_MK.shape[1]
    if lacking > 0:
        pad = (0, lacking)
        top_ids_MK = torch.nn.functional.pad(top_ids_MK, pad, value=-1)
        top_MK = torch.nn.functional.pad(top_MK, pad, value=math.nan)
    return Scores(own_M, top_ids_MK, top_MK)


def _unasked(x_NV: Tensor, top: int, rows: int | None = None) -> Scores:
    rows, dtype = x_NV.shape[0] if rows is None else rows, exact.at_least_fp32(x_NV.dtype)
    return Scores(
        x_NV.new_full((rows,), math.nan, dtype=dtype),
        x_NV.new_full((rows, top), -1, dtype=torch.int64),
        x_NV.new_full((rows, top), math.nan, dtype=dtype),
    )


def _cat(parts: list[Scores]) -> Scores | None:
    return Scores(*map(torch.cat, zip(*parts, strict=True))) if parts else None
