"""Rows to sample: what they ask, and what the sampler makes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from suzuri.engine.sampler import Sampled, Sampler
from suzuri.engine.sampling_params import ResolvedSampling, SamplingParams, resolve
from suzuri.engine.sampling_rows import RowState
from suzuri.processing.vocabulary import FullVocabulary
from tests.kernels.compare import assert_same_bits

V = 17
EOS = 11


def resolved(num_ids: int = V, **fields: Any) -> ResolvedSampling:
    params = SamplingParams(**fields)
    eos = EOS if num_ids > EOS else None
    return resolve(params, FullVocabulary(), num_rows=num_ids, eos_token_id=eos)


@dataclasses.dataclass
class Row:
    """One row and what it is sampled from."""

    fields: dict[str, Any]
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    seed: int = 1
    position: int = 0
    sample_index: int = 0


def run(
    rows: Sequence[Row],
    logits_SV: Tensor,
    *,
    num_ids: int = V,
    device: str = "cpu",
    sampler: Sampler | None = None,
) -> Sampled:
    sampler = sampler or Sampler(num_ids=num_ids, max_slots=len(rows), device=device)
    states: list[RowState] = []
    for row in rows:
        sampling = resolved(num_ids, **row.fields)
        states.append(
            RowState(
                sampling=sampling,
                seed=row.seed,
                position=row.position,
                num_output=len(row.output),
                sample_index=row.sample_index,
                slot=sampler.tables.acquire(sampling, row.prompt, row.output),
            )
        )
    before = logits_SV.clone()
    result = sampler.sample(logits_SV, sampler.rows(states))
    assert_same_bits(logits_SV, before, "the logits were changed")
    if bool(logits_SV.isfinite().all()):
        # Hidden rows that pick one column of the head each: the products are exact.
        h_SD = torch.eye(len(rows), dtype=logits_SV.dtype, device=logits_SV.device)
        head_VD = logits_SV.T.contiguous()
        assert_same_draw(sampler.draw(h_SD, head_VD, 1.0, sampler.step(states)), result, rows)
    for state in states:
        sampler.tables.release(state.slot)
    return result


def assert_same_draw(found: Sampled, expected: Sampled, rows: Sequence[Row]) -> None:
    """What `draw` makes of hidden rows is what `sample` makes of their logits, to the bit."""
    assert_same_bits(found.ids_S, expected.ids_S, "ids")
    pairs = ((found.raw, expected.raw), (found.sampled, expected.sampled))
    for name, (a, b) in zip(("raw", "sampled"), pairs, strict=True):
        assert (a is None) == (b is None), name
        if a is None or b is None:
            continue
        assert a.top_SK.dtype == b.top_SK.dtype
        assert_same_bits(a.logprob_S, b.logprob_S, name)
        for i, row in enumerate(rows):
            # Behind those that a row asked for may stand what its neighbours asked for.
            top = row.fields.get("logprobs") or 0
            for x_SK, y_SK in zip(a[1:], b[1:], strict=True):
                assert_same_bits(x_SK[i, :top], y_SK[i, :top], f"{name} of row {i}")
