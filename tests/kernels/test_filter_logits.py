"""filter_logits: the kept sets against exact rationals, and the bits of what is kept."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from suzuri.kernels.filter_logits import cases, filter_logits, reference
from suzuri.kernels.sample_tokens import sample_tokens
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    generator,
)


def one(
    logits: list[float], *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> list[int]:
    """The ids that stay of one row."""
    kept = filter_logits(
        torch.tensor([logits]),
        torch.tensor([min_p]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
    )
    return (kept[0] > -torch.inf).nonzero()[:, 0].tolist()


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def by_definition(logits: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    """Python integers and rationals over the fp64 weights; every filter on what is left."""
    most = max(logits)
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if min_p > 0:
        order = [v for v in order if logits[v] - most >= math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = [Fraction(math.exp(logits[v] - most)) for v in order]
        wanted, before, kept = Fraction(top_p) * sum(weights), Fraction(0), 0
        while kept < len(order) and (before < wanted or kept == 0):
            before += weights[kept]
            kept += 1
        order = order[:kept]
    return set(order)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(["tiny", "odd"]), indirect=["device"])
def test_kept_ids_against_exact_rationals(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    kept = filter_logits(**arguments)
    sizes: list[int] = []
    for row in range(len(kept)):
        numbers = (float(arguments[name][row]) for name in ("min_p_N", "top_k_N", "top_p_N"))
        min_p, top_k, top_p = numbers
        logits = arguments["logits_NV"][row].tolist()
        expected = by_definition(logits, min_p, int(top_k), top_p)
        found = (kept[row] > -torch.inf).nonzero()[:, 0].tolist()
        assert set(found) == {v for v in expected if logits[v] > -math.inf}, row
        sizes.append(len(found))
    assert sizes[0] == len(arguments["logits_NV"][0]) - 1
    assert max(sizes[1:]) < sizes[0]


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_kept_logits_keep_their_bits(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    kept = filter_logits(**arguments)
    wide = arguments["logits_NV"].to(torch.promote_types(dtype, torch.float32))
    assert kept.dtype == wide.dtype
    stays = kept > -torch.inf
    assert_same_bits(kept[stays], wide[stays])
    assert_same_bits(kept[0], wide[0])
    assert (stays.sum(1) >= 1).all()
    top_k = arguments["top_k_N"][2]
    assert stays[2].sum() == top_k


def test_rows_without_filters_are_untouched_whatever_they_hold():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, -0.0, nan, 1e-45], [-inf, -inf, -inf, -inf], [inf, 1.0, -inf, 2]])
    off = torch.zeros(3), torch.tensor([0, -1, 0]), torch.ones(3)
    assert_same_bits(filter_logits(logits, *off), logits)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equal_ones(top_k: int):
    assert one([1.0, 2.0, 1.0, 1.0, 2.0], top_k=top_k) == sorted([1, 4, 0, 2, 3][:top_k])
    assert one([0.0, -0.0, 0.0, -0.0], top_k=2) == [0, 1]


def test_top_k_above_the_vocabulary_is_off():
    assert one([1.0, 2.0, 3.0], top_k=4) == [0, 1, 2]
    assert one([1.0, 2.0, 3.0], top_k=2**31 - 1) == [0, 1, 2]


def test_top_p_keeps_the_fewest_that_reach_it():
    probabilities = logs(0.125, 0.5, 0.25, 0.125)
    assert one(probabilities, top_p=0.5) == [1]
    assert one(probabilities, top_p=0.5001) == [1, 2]
    assert one(probabilities, top_p=0.76) == [0, 1, 2]
    assert one(probabilities, top_p=0.88) == [0, 1, 2, 3]
    assert one(probabilities, top_p=0.0) == [1]
    assert one(probabilities, top_p=1e-9) == [1]


def test_equal_logits_share_top_p_by_count():
    assert one([3.0] * 8, top_p=0.5) == [0, 1, 2, 3]
    assert one([3.0] * 8, top_p=0.501) == [0, 1, 2, 3, 4]
    assert one([3.0] * 8, top_p=0.0) == [0]


def test_min_p_is_a_share_of_the_largest():
    probabilities = logs(0.05, 0.5, 0.3, 0.15)
    assert one(probabilities, min_p=0.09) == [0, 1, 2, 3]
    assert one(probabilities, min_p=0.11) == [1, 2, 3]
    assert one(probabilities, min_p=0.5) == [1, 2]
    assert one(probabilities, min_p=1.0) == [1]
    assert one([2.0, 2.0, 1.999999], min_p=1.0) == [0, 1]


def test_each_filter_sees_what_the_one_before_left():
    probabilities = logs(0.4, 0.3, 0.2, 0.1)
    # 0.69 of all needs two ids, as does 0.69 of the three that top_k leaves (0.4 / 0.9 < 0.69);
    # 0.76 of all needs three, 0.76 of the three (0.7 / 0.9 = 0.78) two.
    assert one(probabilities, top_p=0.76) == [0, 1, 2]
    assert one(probabilities, top_k=3, top_p=0.76) == [0, 1]
    assert one(probabilities, min_p=0.45, top_p=0.76) == [0, 1]
    assert one(probabilities, min_p=0.7, top_k=3) == [0, 1]


def test_a_nucleus_of_a_wide_flat_row_does_not_overflow():
    """The weights of 200,058 equal ids sum to 2^57.6."""
    flat = torch.zeros(1, 200_058)
    off = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for top_p, expected in ((0.5, 100_029), (0.25, 50_015), (1 - 2**-24, 200_058)):
        kept = filter_logits(flat, *off, torch.tensor([top_p]))[0]
        assert int((kept == 0).sum()) == expected
        assert (kept[:expected] == 0).all()
    with pytest.raises(ValueError, match="4194305 ids per row; at most 4194304"):
        wide = torch.empty(0, reference.MOST_IDS + 1)
        filter_logits(wide, *(torch.empty(0) for _ in range(3)))


@pytest.mark.parametrize("which", range(4))
def test_rows_without_an_answer_stay_so_and_harm_no_other(which: int):
    """a14: a NaN must not come out as a valid draw because a filter dropped it."""
    arguments: Arguments = cases.build("odd", torch.float32, generator(3))
    clean = filter_logits(**arguments)
    logits = arguments["logits_NV"].clone()
    logits[which, 7] = float("nan")
    logits[which + 1] = -torch.inf
    out = filter_logits(**changed(arguments, logits_NV=logits))
    rows = torch.arange(6)
    others = [row for row in range(6) if row not in (which, which + 1)]
    assert_same_bits(out[others], clean[others])
    drawn = sample_tokens(out, torch.ones(6), rows, rows, rows)
    assert drawn[[which, which + 1]].tolist() == [-1, -1]
    assert (drawn[others] >= 0).all()


def test_a_permutation_of_ids_permutes_the_result(device: str):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(4, device))
    distinct = torch.stack(
        [torch.randperm(301, generator=generator(row, device), device=device) for row in range(9)]
    )
    logits = distinct.float() / 20
    order = torch.randperm(301, generator=generator(5, device), device=device)

    def kept(x: Tensor) -> Tensor:
        return filter_logits(**changed(arguments, logits_NV=x))

    assert_same_bits(kept(logits[:, order]), kept(logits)[:, order])
