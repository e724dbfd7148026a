"""sample_tokens: the contract's formula in Python integers and fp64, and its statistics."""

import math

import pytest
import torch
from torch import Tensor

from suzuri.kernels.sample_tokens import PURPOSE_SAMPLE, cases, reference, sample_tokens
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    generator,
)
from tests.kernels.plain_philox import philox_words

PER_ROW = ("logits_NV", "temperature_N", "seeds_N", "positions_N", "sample_index_N")
DRAWS = 20_000


def rows_of(arguments: Arguments, rows: slice | Tensor) -> Arguments:
    return {name: arguments[name][rows] for name in PER_ROW}


def draws(logits_V: Tensor, temperature: float, count: int = DRAWS, **changes: Tensor) -> Tensor:
    """One request's draws at positions 0 .. count - 1."""
    device = logits_V.device
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    arguments: Arguments = {
        "logits_NV": logits_V.expand(count, -1),
        "temperature_N": torch.full((count,), temperature, device=device),
        "seeds_N": zeros + 12345,
        "positions_N": torch.arange(count, device=device),
        "sample_index_N": zeros,
    }
    return sample_tokens(**changed(arguments, **changes))


def plain_noise(word: int) -> float:
    """-ln(-ln(1 - u)), u = (word + 1/2) / 2^32."""
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


@each_dtype
@pytest.mark.parametrize("purpose", [PURPOSE_SAMPLE, 3])
@pytest.mark.parametrize(("device", "case"), device_cases(["tiny", "odd"]), indirect=["device"])
def test_the_formula_in_integers_and_fp64(device: str, case: str, purpose: int, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    drawn = sample_tokens(**arguments, purpose=purpose).tolist()
    temperatures = arguments["temperature_N"].tolist()
    assert temperatures[0] == 0
    assert min(temperatures[1:]) > 0
    for row, temperature in enumerate(temperatures):
        logits = arguments["logits_NV"][row].tolist()
        seed, position, index = (int(arguments[name][row]) for name in PER_ROW[2:])
        score = logits
        if temperature:
            score = [
                logit / temperature
                + plain_noise(philox_words(seed, [position, v // 4, purpose, index])[v % 4])
                for v, logit in enumerate(logits)
            ]
        best = max(range(len(logits)), key=lambda v, score=score: (score[v], -v))
        assert drawn[row] == best, row


@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_ids_are_of_the_vocabulary(device: str, case: str):
    arguments: Arguments = cases.build(case, torch.float32, generator(2, device))
    drawn = sample_tokens(**arguments)
    rows, vocabulary = cases.SHAPES[case]
    assert (drawn.shape, drawn.dtype) == ((rows,), torch.int64)
    assert ((drawn >= 0) & (drawn < vocabulary)).all()
    assert drawn[0] == arguments["logits_NV"][0].argmax()
    assert len(drawn.unique()) > rows // 2


def test_noise_is_precise_where_the_winners_lie(monkeypatch: pytest.MonkeyPatch):
    """Small words win: their noise is -ln(e) with e to full relative precision."""
    words = [0, 1, 2, 3, 1000, 2**22 - 2, 2**22 - 1, 2**22, 2**22 + 1, 2**25, 2**28, 2**30, 2**31]
    words += [3 * 2**30, 2**32 - 2**10, 2**32 - 2, 2**32 - 1]
    given = torch.tensor(words).unflatten(0, (1, -1))
    monkeypatch.setattr(reference, "philox", lambda *counters: (given, given, given, given))
    one = torch.zeros(1, dtype=torch.int64)
    noise = reference.gumbel(one, one, one, 0, 4 * len(words)).unflatten(1, (-1, 4))[0, :, 0]
    assert noise.isfinite().all()
    expected = torch.tensor([plain_noise(word) for word in words], dtype=torch.float64)
    error = (noise.double() - expected).abs() / expected.abs().clamp(min=1)
    assert (error[:14] < 2.0**-22).all()
    # Above that 1 - u has few bits left; it is the least noise there is, and stays it.
    assert (noise.diff() <= 0).all()
    assert (noise[14:] < -2.6).all()


def chi_square(drawn: Tensor, logits_V: Tensor, temperature: float) -> float:
    """Pearson's statistic over the ids that can occur, as standard deviations above its mean
    (Wilson and Hilferty, 1931)."""
    expected = torch.softmax(logits_V.double() / temperature, -1) * len(drawn)
    counts = torch.bincount(drawn, minlength=len(logits_V)).double()
    possible = expected > 0
    assert not counts[~possible].any()
    assert expected[possible].min() > 5
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(device: str, temperature: float):
    logits = torch.linspace(-1.5, 1.5, 17, device=device)
    logits[[2, 16]] = -torch.inf
    drawn = draws(logits, temperature)
    assert chi_square(drawn, logits, temperature) < 4
    assert chi_square(drawn, logits, temperature * 1.2) > 6


@pytest.mark.parametrize("what", ["seeds_N", "sample_index_N"])
def test_draws_over_seeds_and_sample_indexes_follow_the_softmax(device: str, what: str):
    """Counters may run over any of the words, each giving independent noise."""
    logits = torch.randn(9, generator=generator(4, device), device=device)
    running = torch.arange(DRAWS, device=device)
    counters: Arguments = {what: running, "positions_N": torch.zeros_like(running)}
    drawn = draws(logits, 1.0, **counters)
    assert chi_square(drawn, logits, 1.0) < 4


def test_successive_draws_are_independent(device: str):
    """Pairs of neighbouring positions over 4 equal ids: 16 equally likely cells."""
    drawn = draws(torch.zeros(4, device=device), 1.0)
    pairs = drawn[0::2] * 4 + drawn[1::2]
    assert chi_square(pairs, torch.zeros(16, device=device), 1.0) < 4


@each_dtype
def test_temperature_zero_is_the_lowest_id_of_the_largest(device: str, dtype: torch.dtype):
    logits = torch.randint(-2, 3, (30, 301), generator=generator(5, device), device=device)
    logits[7] = 0
    drawn = sample_tokens(logits.to(dtype), **many(30, device))
    for row, best in zip(logits.tolist(), drawn.tolist(), strict=True):
        assert best == row.index(max(row))


def many(rows: int, device: str) -> Arguments:
    """The other arguments of greedy rows."""
    index = torch.arange(rows, device=device)
    return {
        "temperature_N": torch.zeros(rows, device=device),
        "seeds_N": index,
        "positions_N": index,
        "sample_index_N": index,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_masked_ids_are_never_drawn(device: str, temperature: float):
    logits = torch.zeros(301, device=device)
    logits[torch.randperm(301, generator=generator(6, device), device=device)[:295]] = -torch.inf
    logits[0] = -torch.inf
    allowed = logits.isfinite().nonzero()[:, 0]
    drawn = draws(logits, temperature, 3000)
    expected = allowed[:1] if temperature == 0 else allowed
    assert_same_bits(drawn.unique(), expected)
    only = torch.full_like(logits, -torch.inf)
    only[300] = -1e4
    assert (draws(only, temperature, 50) == 300).all()


def test_a_row_depends_on_itself_alone(device: str):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(7, device))
    drawn = sample_tokens(**arguments)
    for row in range(9):
        alone = sample_tokens(**rows_of(arguments, slice(row, row + 1)))
        assert_same_bits(alone, drawn[row : row + 1])
    backwards = torch.arange(8, -1, -1, device=device)
    assert_same_bits(sample_tokens(**rows_of(arguments, backwards)), drawn[backwards])
    twice = sample_tokens(**rows_of(arguments, torch.tensor([4, 4, 4], device=device)))
    assert_same_bits(twice, drawn[4:5].expand(3))


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 1000])
def test_vocabulary_padding_changes_no_draw(device: str, padding: int):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(8, device))
    drawn = sample_tokens(**arguments)
    pad = torch.full((9, padding), -torch.inf, device=device)
    padded = torch.cat([arguments["logits_NV"], pad], 1)
    assert_same_bits(sample_tokens(**changed(arguments, logits_NV=padded)), drawn)


def test_every_counter_gives_other_draws(device: str):
    flat = torch.zeros(1000, device=device)
    zeros = torch.zeros(200, dtype=torch.int64, device=device)
    base = draws(flat, 1.0, 200)
    others = [
        draws(flat, 1.0, 200, sample_index_N=zeros + 1),
        draws(flat, 1.0, 200, positions_N=torch.arange(200, 400, device=device)),
        draws(flat, 1.0, 200, seeds_N=zeros + 12346),
        draws(flat, 1.0, 200, seeds_N=zeros + 12345 + (1 << 32)),
    ]
    arguments = changed(many(200, device), temperature_N=torch.ones(200, device=device))
    by_purpose = [
        sample_tokens(flat.expand(200, -1), **arguments, purpose=purpose) for purpose in range(3)
    ]
    groups = [[base, *others], by_purpose]
    for group in groups:
        for i, a in enumerate(group):
            for b in group[:i]:
                assert (a == b).sum() < 5
    assert_same_bits(draws(flat, 1.0, 200), base)


def test_a_row_without_an_answer_gives_minus_one_and_harms_no_other(device: str):
    logits_NV = torch.randn(4, 37, generator=generator(9), device="cpu").to(device)
    clean_N = draw_rows(logits_NV)
    logits_NV[1, 5] = float("nan")
    logits_NV[2] = float("-inf")
    drawn_N = draw_rows(logits_NV)
    assert drawn_N[1] == drawn_N[2] == -1
    assert torch.equal(drawn_N[[0, 3]], clean_N[[0, 3]])
    assert int(clean_N.min()) >= 0


def draw_rows(logits_NV: Tensor) -> Tensor:
    """Each row at temperature 1 with its own seed."""
    rows = torch.arange(len(logits_NV), device=logits_NV.device)
    zero = torch.zeros_like(rows)
    return sample_tokens(logits_NV, torch.ones_like(logits_NV[:, 0]), rows, zero, zero)
