"""Rows to sample: what they ask, and what the sampler makes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

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
    for state in states:
        sampler.tables.release(state.slot)
    return result
