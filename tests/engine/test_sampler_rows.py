"""The sampler: each row by itself, rows without an answer, and what is kept between steps."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suzuri.engine.sampler import SLICE, Sampled, Sampler, Scores, score
from suzuri.engine.sampling_params import SamplingParams, resolve
from suzuri.engine.sampling_rows import RowState
from suzuri.kernels import dispatch
from suzuri.kernels.log_softmax import log_softmax
from suzuri.processing.vocabulary import FullVocabulary
from tests.engine.sampling import Row, V, resolved, run
from tests.kernels.compare import assert_same_bits, generator


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield "cpu"
        return
    with dispatch.force("reference"):
        yield "cuda"


# --- a row by itself ---


def mixed_rows() -> tuple[list[Row], Tensor]:
    """70 rows over three slices with every feature here and there."""
    rows: list[Row] = []
    for place in range(70):
        fields: dict[str, Any] = {"temperature": (0.0, 0.5, 1.0, 1e-6, 1e-9)[place % 5]}
        if place % 2:
            fields |= {"top_p": 0.9, "min_p": 0.01}
        if place % 3 == 0:
            fields |= {"top_k": 3 + place}
        if place % 4 == 0:
            fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        if place % 7 == 0:
            fields |= {"logit_bias": {place: 3.0}}
        if place % 9 == 0:
            fields |= {"allowed_token_ids": list(range(0, 301, 2))}
        if place % 5 < 3:
            fields |= {"logprobs": place % 6}
        if place % 4 < 2:
            fields |= {"sampled_logprobs": True}
        if place % 6 == 0:
            fields |= {"min_tokens": 4, "stop_token_ids": [0, 1, 2]}
        tokens = torch.randint(301, (12,), generator=generator(place)).tolist()
        rows.append(Row(fields, tokens[:7], tokens[7 : 7 + place % 6], place * 7 - 200, place))
    logits = torch.randn(70, 301, generator=generator(1)) * 3
    return rows, (logits * 4).round() / 4


def columns(scores: Scores | None, row: int, top: int) -> list[Tensor]:
    assert scores is not None
    return [scores.logprob_S[row], scores.top_ids_SK[row, :top], scores.top_SK[row, :top]]


def assert_same_row(a: Sampled, i: int, b: Sampled, j: int, row: Row) -> None:
    assert a.ids_S[i] == b.ids_S[j]
    top = row.fields.get("logprobs")
    if top is not None:
        for x, y in zip(columns(a.raw, i, top), columns(b.raw, j, top), strict=True):
            assert_same_bits(x, y, "raw")
    if "sampled_logprobs" in row.fields:
        pairs = zip(columns(a.sampled, i, top or 0), columns(b.sampled, j, top or 0), strict=True)
        for x, y in pairs:
            assert_same_bits(x, y, "sampled")


def test_a_row_has_the_same_bits_alone_and_anywhere_in_any_batch(device: str):
    """c13: same seed, same ids; whatever the neighbours ask for."""
    rows, logits = mixed_rows()
    logits = logits.to(device)
    whole = run(rows, logits, num_ids=301, device=device)
    assert len(set(whole.ids_S.tolist())) > 40
    order = torch.randperm(70, generator=generator(2)).tolist()
    shuffled = run([rows[i] for i in order], logits[order], num_ids=301, device=device)
    for place, i in enumerate(order):
        assert_same_row(shuffled, place, whole, i, rows[i])
    for start, stop in ((0, 1), (5, 38), (33, 34), (31, 70), (69, 70)):
        some = run(rows[start:stop], logits[start:stop], num_ids=301, device=device)
        for i in range(start, stop):
            assert_same_row(some, i - start, whole, i, rows[i])
    for i in range(70):
        assert_same_row(
            run([rows[i]], logits[i : i + 1], num_ids=301, device=device), 0, whole, i, rows[i]
        )


def test_rows_that_did_not_ask_have_no_log_probs():
    rows, logits = mixed_rows()
    whole = run(rows, logits, num_ids=301)
    assert whole.raw is not None
    assert whole.sampled is not None
    asked = torch.tensor(["logprobs" in row.fields for row in rows])
    assert_same_bits(whole.raw.logprob_S.isnan(), ~asked)
    assert_same_bits(whole.raw.top_ids_SK[:, 0] == -1, ~asked)
    asked = torch.tensor(["sampled_logprobs" in row.fields for row in rows])
    assert_same_bits(whole.sampled.logprob_S.isnan(), ~asked)
    plain = run([Row({}), Row({"top_k": 2})], logits[:2], num_ids=301)
    assert plain.raw is plain.sampled is None


def test_without_fields_the_log_probs_are_those_of_the_logits():
    """Neither filters nor temperature 1 change a bit, also next to rows with all of them."""
    logits = torch.randn(SLICE + 3, 301, generator=generator(3))
    rows = [Row({"logprobs": 3, "sampled_logprobs": True}, seed=i) for i in range(SLICE + 3)]
    busy = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "top_k": 4, "logit_bias": {1: 1}}
    for place in (0, 5, SLICE + 1):
        rows[place] = Row(busy | {"presence_penalty": 1.0, "min_tokens": 1})
    result = run(rows, logits, num_ids=301)
    plain = [i for i in range(SLICE + 3) if i not in (0, 5, SLICE + 1)]
    expected = log_softmax(logits).gather(1, result.ids_S[:, None])[:, 0]
    assert result.raw is not None
    assert result.sampled is not None
    assert_same_bits(result.raw.logprob_S[plain], expected[plain])
    for a, b in zip(result.raw, result.sampled, strict=True):
        assert_same_bits(a[plain], b[plain])


def test_prompt_log_probs_have_the_bits_of_generated_ones():
    logits = torch.randn(70, 301, generator=generator(4))
    result = run([Row({"logprobs": 4}, seed=i) for i in range(70)], logits, num_ids=301)
    assert result.raw is not None
    for a, b in zip(score(logits, result.ids_S, 4), result.raw, strict=True):
        assert_same_bits(a, b)
    only = score(logits, result.ids_S, 0)
    assert only.top_SK.shape == (70, 0)
    assert_same_bits(only.logprob_S, result.raw.logprob_S)
    nothing = score(logits[:0], result.ids_S[:0], 2)
    assert nothing.top_ids_SK.shape == (0, 2)


def test_equal_log_probs_are_listed_by_id():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0]])
    result = run([Row({"logprobs": 5})], logits, num_ids=5)
    assert result.raw is not None
    assert result.raw.top_ids_SK.tolist() == [[1, 3, 0, 2, 4]]


def test_more_alternatives_than_ids():
    result = run([Row({"logprobs": 4})], torch.tensor([[1.0, 2.0]]), num_ids=2)
    assert result.raw is not None
    assert result.raw.top_ids_SK.tolist() == [[1, 0, -1, -1]]
    assert result.raw.top_SK.isnan().tolist() == [[False, False, True, True]]


# --- rows without an answer ---


def test_broken_logits_are_reported_and_harm_no_other():
    """a14: NaN, infinity and a fully masked row give -1, also where a mask hides the NaN."""
    asked = {"logprobs": 2, "sampled_logprobs": True}
    fields = [{}, {"top_p": 0.5}, {"allowed_token_ids": [0, 1]}, {}, {"temperature": 0}, {}]
    fields += [{"allowed_token_ids": [3], "min_tokens": 1}, {}, {"top_k": 2}]
    rows = [Row(f | asked, seed=i) for i, f in enumerate(fields)]
    logits = torch.randn(len(rows), V, generator=generator(7))
    clean = run(rows, logits)
    assert (clean.ids_S >= 0).all()
    logits[[0, 1, 2, 4], 5] = torch.tensor([math.nan, math.nan, math.nan, math.inf])
    logits[3] = -math.inf
    logits[6, 3] = -math.inf
    result = run(rows, logits)
    assert result.ids_S[[0, 1, 2, 3, 4, 6]].tolist() == [-1] * 6
    for scores in (result.raw, result.sampled):
        assert scores is not None
        assert scores.logprob_S[[0, 1, 2, 3, 4, 6]].isnan().all()
        assert (scores.top_ids_SK[[0, 1, 2, 3, 4, 6]] == -1).all()
    for row in (5, 7, 8):
        assert_same_row(result, row, clean, row, rows[row])


# --- state ---


def test_counts_kept_on_the_device_are_those_of_the_host():
    """Five steps with the ids added on the device, against slots made anew from the whole output;
    the second sequence without penalties, the third with an answer only at first."""
    fields = {"frequency_penalty": 1.0, "repetition_penalty": 1.4, "temperature": 0.8}
    prompts = [[1, 2, 2], [4], [9]]
    penalized = [fields, {}, fields]
    sampler = Sampler(num_ids=V, max_slots=2, device="cpu")
    samplings = [resolved(**f) for f in penalized]
    slots = [
        sampler.tables.acquire(sampling, prompt)
        for sampling, prompt in zip(samplings, prompts, strict=True)
    ]
    assert slots[1] == -1
    outputs: list[list[int]] = [[], [], []]
    for step in range(6):
        logits = torch.randn(3, V, generator=generator(step))
        if step >= 4:
            logits[2, 0] = math.nan
        rows = [
            Row(f, prompt, output, seed=3, position=step)
            for f, prompt, output in zip(penalized, prompts, outputs, strict=True)
        ]
        states = [
            RowState(sampling=s, seed=3, position=step, num_output=step, slot=slot)
            for s, slot in zip(samplings, slots, strict=True)
        ]
        params = sampler.rows(states)
        ids = sampler.sample(logits, params).ids_S
        sampler.count(params, ids)
        assert_same_bits(ids, run(rows, logits).ids_S)
        for output, id in zip(outputs, ids.tolist(), strict=True):
            output.extend([id] if id >= 0 else [])
    assert len(outputs[2]) == 4
    assert sampler.tables.output_LV is not None
    for place in (0, 2):
        counts = torch.bincount(torch.tensor(outputs[place]), minlength=V)
        assert_same_bits(sampler.tables.output_LV[slots[place]], counts.to(torch.int32))


def test_tables_exist_only_when_needed_and_grow():
    sampler = Sampler(num_ids=V, max_slots=9, device="cpu")
    tables = sampler.tables
    plain, biased = resolved(top_p=0.5), resolved(logit_bias={3: 2.0})
    penalized = resolved(presence_penalty=1.0)
    assert tables.acquire(plain, [1]) == -1
    tables.release(-1)
    assert tables.bias_LV is tables.output_LV is None
    first = tables.acquire(biased, [1])
    assert tables.bias_LV is not None
    assert tables.output_LV is None
    bias = tables.bias_LV[first].clone()
    assert bias.tolist() == [0, 0, 0, 2] + [0] * (V - 4)
    slots = [tables.acquire(penalized, [slot], [slot, slot]) for slot in range(8)]
    assert len({first, *slots}) == 9 == tables.num_used
    assert_same_bits(tables.bias_LV[first], bias)
    assert tables.output_LV is not None
    assert tables.prompt_LV is not None
    for place, slot in enumerate(slots):
        expected = [2 * (v == place) for v in range(V)]
        assert tables.output_LV[slot].tolist() == expected
        assert tables.prompt_LV[slot].tolist() == [v == place for v in range(V)]
    with pytest.raises(ValueError, match="all 9 slots for penalties and biases are in use"):
        tables.acquire(biased, [])
    tables.release(slots[3])
    with pytest.raises(ValueError, match=f"slot {slots[3]} of the sampling tables is not in use"):
        tables.release(slots[3])
    again = tables.acquire(penalized, [], [5])
    assert again == slots[3]
    assert tables.prompt_LV[again].any().item() is False
    assert tables.output_LV[again].nonzero().tolist() == [[5]]


def test_a_row_without_its_slot_is_refused():
    sampler = Sampler(num_ids=V, max_slots=1, device="cpu")
    cases: list[dict[str, Any]] = [{"logit_bias": {1: 1.0}}, {"frequency_penalty": 0.1}]
    for fields in cases:
        state = RowState(sampling=resolved(**fields), seed=0, position=0, num_output=0)
        with pytest.raises(ValueError, match="row 0 has a bias or penalties and no slot"):
            sampler.rows([state])
    with pytest.raises(ValueError, match=r"logits are \[2, 17\]; expected 0 rows of 17"):
        sampler.sample(torch.zeros(2, V), sampler.rows([]))
    assert sampler.sample(torch.zeros(0, V), sampler.rows([])).ids_S.tolist() == []


class NoReadBack(TorchDispatchMode):
    """Refuses what makes the host wait for the device or lets values decide a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        refused = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal")
        assert name not in (*refused, "unique", "unique_consecutive", "_unique2"), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


def test_nothing_between_logits_and_result_waits_for_the_device():
    rows, logits = mixed_rows()
    sampler = Sampler(num_ids=301, max_slots=70, device="cpu")
    states = [
        RowState(
            sampling=(s := resolved(301, **row.fields)),
            seed=row.seed,
            position=row.position,
            num_output=len(row.output),
            slot=sampler.tables.acquire(s, row.prompt, row.output),
        )
        for row in rows
    ]
    params = sampler.rows(states)
    with NoReadBack():
        result = sampler.sample(logits, params)
        sampler.count(params, result.ids_S)
    assert (result.ids_S >= 0).all()
    with pytest.raises(AssertionError, match="index by a mask"), NoReadBack():
        _ = logits[logits > 0]
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReadBack():
        logits[0, 0].item()


def test_fp64_logits_stay_fp64():
    logits = torch.randn(2, V, generator=generator(8), dtype=torch.float64)
    rows = [Row({"logprobs": 2, "sampled_logprobs": True, "temperature": 0.5, "top_p": 0.9})] * 2
    result = run(rows, logits)
    assert result.raw is not None
    assert result.sampled is not None
    assert result.raw.logprob_S.dtype == result.sampled.top_SK.dtype == torch.float64
    exact = torch.log_softmax(logits, -1).gather(1, result.ids_S[:, None])[:, 0]
    assert (result.raw.logprob_S - exact).abs().max() < 1e-14


def test_plain_rows_are_those_that_ask_for_nothing():
    """What skips the upload of parameters must want the most likely id, whatever came before."""
    plain: list[dict[str, Any]] = [{}, {"seed": 3}, {"top_p": 0.5, "top_k": 2}, {"max_tokens": 5}]
    asking: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"sampled_logprobs": True},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"presence_penalty": 0.5},
        {"min_tokens": 2, "stop_token_ids": [7]},
    ]
    for expected, cases in ((True, plain), (False, asking)):
        for words in cases:
            chosen: dict[str, Any] = {"temperature": 0.0} | words
            params = SamplingParams(**chosen)
            found = resolve(params, FullVocabulary(), num_rows=300, eos_token_id=None)
            assert found.is_plain is expected, words
