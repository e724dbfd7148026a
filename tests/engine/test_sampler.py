"""The sampler against a slow oracle in Python, and its statistics."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from suzuri.engine.sampler import Sampler, Scores
from suzuri.engine.sampling_params import SamplingParams
from suzuri.kernels.sample_tokens import sample_tokens
from tests.engine.sampling import EOS, Row, V, run
from tests.kernels.compare import assert_same_bits, generator

# --- the oracle ---


def oracle(logits: list[float], row: Row) -> tuple[dict[int, float], float]:
    """({id: probability} of the distribution drawn from, in fp64; how close the nearest decision
    was, so that cases on the edge can be left out)."""
    params = SamplingParams(**row.fields)
    x = [logit + (params.logit_bias or {}).get(v, 0.0) for v, logit in enumerate(logits)]
    if params.allowed_token_ids is not None:
        x = [value if v in params.allowed_token_ids else -math.inf for v, value in enumerate(x)]
    for v in range(len(x)):
        count = list(row.output).count(v)
        if v in row.prompt or count:
            ratio = params.repetition_penalty
            x[v] = x[v] / ratio if x[v] > 0 else x[v] * ratio
        x[v] -= params.frequency_penalty * count + params.presence_penalty * bool(count)
    if len(row.output) < params.min_tokens:
        for v in {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}:
            x[v] = -math.inf
    if params.is_greedy:
        best = max(range(len(x)), key=lambda v: (x[v], -v))
        others = [x[best] - value for v, value in enumerate(x) if v != best]
        return {best: 1.0}, min(others)
    p = normalized({v: math.exp(value / params.temperature) for v, value in enumerate(x)})
    margin = 1.0
    most = max(p.values())
    if params.min_p > 0:
        margin = min(margin, *(abs(q - params.min_p * most) for q in p.values()))
        p = normalized({v: q for v, q in p.items() if q >= params.min_p * most})
    order = sorted(p, key=lambda v: (-p[v], v))
    if params.top_k > 0:
        order = order[: params.top_k]
        margin = min([margin, *(p[order[-1]] - p[v] for v in p if v not in order and p[v] > 0)])
        p = normalized({v: p[v] for v in order})
    if params.top_p < 1:
        total, kept = 0.0, list[int]()
        for v in order:
            if kept and total >= params.top_p:
                break
            kept.append(v)
            total += p[v]
            margin = min(margin, abs(total - params.top_p) if len(kept) < len(order) else 1.0)
        p = normalized({v: p[v] for v in kept})
    return {v: q for v, q in p.items() if q > 0}, margin


def normalized(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {v: weight / total for v, weight in weights.items()}


def any_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": any_of(0.0, 0.3, 0.7, 1.0, 1.7),
        "top_p": any_of(0.0, 0.2, 0.55, 0.9, 0.99),
        "top_k": any_of(-1, 1, 2, 5, 16, 17, 40),
        "min_p": any_of(0.01, 0.1, 0.5, 1.0),
        "repetition_penalty": any_of(0.5, 1.3, 2.0),
        "presence_penalty": any_of(-1.0, 0.5, 2.0),
        "frequency_penalty": any_of(-0.3, 0.4),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=4),
        "allowed_token_ids": st.sets(st.integers(0, V - 1), min_size=1).map(sorted),
        "min_tokens": any_of(0, 3),
        "stop_token_ids": any_of([], [2, 5]),
        "ignore_eos": st.booleans(),
    },
)
TOKENS = st.lists(st.integers(0, V - 1), max_size=8)


def every(row: Row) -> Row:
    """The row asking for all log-probs of the small vocabulary."""
    return dataclasses.replace(row, fields=row.fields | {"logprobs": V, "sampled_logprobs": True})


def distribution(scores: Scores, row: int) -> dict[int, float]:
    pairs = zip(scores.top_ids_SK[row].tolist(), scores.top_SK[row].tolist(), strict=True)
    return {v: logprob for v, logprob in pairs if logprob > -math.inf}


def is_possible(row: Row) -> bool:
    allowed = row.fields.get("allowed_token_ids")
    stops = {*row.fields.get("stop_token_ids", ())}
    stops |= set() if row.fields.get("ignore_eos") else {EOS}
    return not (allowed and row.fields.get("min_tokens") and set(allowed) <= stops)


@settings(max_examples=150, deadline=None)
@given(
    drawn=st.lists(st.tuples(FIELDS, TOKENS, TOKENS), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_the_distribution_is_that_of_the_oracle(drawn: list[Any], seed: int):
    """a14: every field alone and mixed within one batch; kept sets by enumeration."""
    rows = [Row(fields, prompt, output, seed=seed) for fields, prompt, output in drawn]
    rows = [every(row) for row in rows if is_possible(row)]
    logits = 2 * torch.randn(len(rows), V, generator=generator(seed))
    result = run(rows, logits)
    assert result.ids_S.shape == (len(rows),)
    for place, row in enumerate(rows):
        assert result.raw is not None
        assert result.sampled is not None
        raw = distribution(result.raw, place)
        log_total = math.log(sum(map(math.exp, logits[place].tolist())))
        for v, logit in enumerate(logits[place].tolist()):
            assert raw[v] == pytest.approx(logit - log_total, abs=1e-5)
        expected, margin = oracle(logits[place].tolist(), row)
        if margin < 1e-5:
            continue
        found = distribution(result.sampled, place)
        assert found.keys() == expected.keys(), (row, found, expected)
        for v, q in expected.items():
            assert found[v] == pytest.approx(math.log(q), abs=1e-4), (row, v)
        id = int(result.ids_S[place])
        assert id in expected
        assert float(result.sampled.logprob_S[place]) == found[id]
        assert float(result.raw.logprob_S[place]) == raw[id]


# --- the draw ---


def expectation(row: Row, logits: Tensor) -> Tensor:
    p, margin = oracle(logits.tolist(), row)
    assert margin > 1e-4
    return torch.tensor([p.get(v, 0.0) for v in range(len(logits))], dtype=torch.float64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.8, "logit_bias": {3: 1.0}},
        {"min_p": 0.1, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_draws_over_seeds_follow_the_oracle(fields: dict[str, Any]):
    """c13: Pearson's chi-square over 16,000 seeds; the same draws do not fit plain softmax."""
    count = 16_000
    logits = torch.tensor([1.0, 0.3, -0.4, 0.0, 0.9, -1.2, 0.5])
    rows = [Row(fields, prompt=[0, 2], seed=seed) for seed in range(count)]
    sampler = Sampler(num_ids=7, max_slots=count, device="cpu")
    with torch.no_grad():
        ids = torch.cat(
            [
                run(rows[i : i + 2000], logits.expand(2000, -1), num_ids=7, sampler=sampler).ids_S
                for i in range(0, count, 2000)
            ]
        )
    counts = torch.bincount(ids, minlength=7).double()

    def chi_square(p: Tensor) -> float:
        possible = p > 0
        assert not counts[~possible].any()
        expected = p[possible] * count
        return float(((counts[possible] - expected) ** 2 / expected).sum())

    # 6 degrees of freedom at most: above 33 once in 100,000 sets of seeds.
    assert chi_square(expectation(rows[0], logits)) < 33
    if fields:
        plain = torch.softmax(logits.double(), -1)
        assert float(((counts - plain * count) ** 2 / (plain * count)).sum()) > 100


def test_samples_of_one_request_differ_and_repeat():
    logits = torch.zeros(1, 301)
    rows = [Row({}, seed=5, sample_index=index) for index in range(40)]
    drawn = run(rows, logits.expand(40, -1), num_ids=301).ids_S
    assert len(drawn.unique()) > 30
    assert_same_bits(run(rows[::-1], logits.expand(40, -1), num_ids=301).ids_S.flip(0), drawn)
    greedy = [Row({"temperature": 0}, seed=5, sample_index=index) for index in range(3)]
    logits = torch.randn(1, 301, generator=generator(5))
    assert run(greedy, logits.expand(3, -1), num_ids=301).ids_S.unique().numel() == 1


def test_greedy_rows_take_the_lowest_of_the_largest_with_certainty():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    row = Row({"temperature": 0.0, "top_p": 0.1, "logprobs": 4, "sampled_logprobs": True})
    result = run([row], logits, num_ids=4)
    assert result.ids_S.tolist() == [1]
    assert result.sampled is not None
    assert result.sampled.logprob_S.tolist() == [0.0]
    assert result.sampled.top_ids_SK[0, 0] == 1
    assert result.sampled.top_SK.tolist() == [[0.0, -math.inf, -math.inf, -math.inf]]


def test_greedy_rows_draw_what_sample_tokens_draws_without_noise():
    logits = torch.randint(-2, 3, (40, V), generator=generator(9)).float()
    logits[3] = -math.inf
    zero = torch.zeros(40)
    expected = sample_tokens(logits, zero, zero.long(), zero.long(), zero.long())
    assert_same_bits(run([Row({"temperature": 0})] * 40, logits).ids_S, expected)
    assert expected[3] == -1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_tiny_temperatures_give_no_nan(scale: float):
    """c15: 0, 0.0, 1e-9, 1e-6, 1 and 100 in one batch."""
    logits = torch.randn(6, 301, generator=generator(6)) * scale
    asked = {"logprobs": 5, "sampled_logprobs": True}
    rows = [Row({"temperature": t, **asked}) for t in (0, 0.0, 1e-9, 1e-6, 1, 100)]
    result = run(rows, logits, num_ids=301)
    assert (result.ids_S[:3] == logits[:3].argmax(-1)).all()
    if scale >= 1:
        assert result.ids_S[3] == logits[3].argmax()
    for scores in (result.raw, result.sampled):
        assert scores is not None
        assert not any(part.isnan().any() for part in scores)
        assert scores.logprob_S.isfinite().all()
        assert (scores.logprob_S <= 0).all()
