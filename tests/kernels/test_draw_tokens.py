"""draw_tokens: the draws and log-probs that the whole logits give, by the ops for those."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels.draw_tokens import (
    MOST_ROWS,
    RAW,
    SAMPLED,
    Drawn,
    cases,
    draw_tokens,
    reference,
    slices,
)
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.log_softmax.reference import CHUNK
from suzuri.kernels.matmul import matmul
from suzuri.kernels.sample_tokens import sample_tokens
from tests.kernels.compare import Arguments, assert_same_bits, changed, device_cases, generator

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def by_way_of_logits(given: Arguments, *, purpose: int = 0) -> Drawn:
    """Head, division, draw and log-softmax one after the other, of all logits."""
    h_ND, draws, wants_N = given["h_ND"], given["draws"], given["wants_N"]
    wide = torch.float64 if h_ND.dtype == torch.float64 else torch.float32
    logits_NV = matmul(h_ND, given["unembed_VD"], scale=given["scale"], out_dtype=wide)
    rows = logits_NV.shape[0]
    zero_N = torch.zeros(rows, dtype=torch.int64, device=h_ND.device)
    draws = draws or Draws(zero_N.float(), zero_N, zero_N, zero_N)
    noisy_N = (draws.temperature_N > 0).float()
    divisor_N = torch.where(noisy_N > 0, draws.temperature_N, 1.0).to(wide)
    tempered_NV = logits_NV / divisor_N[:, None]
    ids_N = sample_tokens(tempered_NV, noisy_N, *draws[1:], purpose=purpose)
    ids_N = torch.where(logits_NV.amax(-1).isfinite(), ids_N, -1)
    if wants_N is None:
        return Drawn(ids_N, None, None)

    def own(x_NV: Tensor, bit: int) -> Tensor:
        x_N = log_softmax(x_NV).gather(1, ids_N.clamp(min=0)[:, None])[:, 0]
        return torch.where((ids_N >= 0) & (wants_N & bit > 0), x_N, math.nan)

    id_V = torch.arange(logits_NV.shape[1], device=h_ND.device)
    likely_NV = (noisy_N > 0)[:, None] | (id_V == ids_N[:, None])
    drawn_NV = torch.where(likely_NV, tempered_NV, -math.inf)
    return Drawn(ids_N, own(logits_NV, RAW), own(drawn_NV, SAMPLED))


def assert_same(found: Any, expected: Drawn, what: str = "") -> None:
    for name, a, b in zip(("ids", "raw", "sampled"), found, expected, strict=True):
        assert (a is None) == (b is None), (what, name)
        if a is not None and b is not None:
            assert_same_bits(a.nan_to_num(7.0), b.nan_to_num(7.0), f"{what} {name}")


def one_row(drawn: Drawn, row: int) -> Drawn:
    assert drawn.raw_N is not None
    assert drawn.sampled_N is not None
    run = slice(row, row + 1)
    return Drawn(drawn.ids_N[run], drawn.raw_N[run], drawn.sampled_N[run])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["tiny", "odd"])
def test_bits_of_the_whole_logits(case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1))
    expected = by_way_of_logits(given)
    found = draw_tokens(**given)
    assert_same(found, expected)
    assert found.raw_N is not None
    assert (found.raw_N.isnan() == (given["wants_N"] % 2 == 0)).all()
    words = ("h_ND", "unembed_VD", "draws", "wants_N", "scale")
    for width in (CHUNK, 2 * CHUNK):
        given_here: list[Any] = [given[word] for word in words]
        cut = reference.draw_tokens(*given_here, purpose=0, width=width)
        assert_same(cut, expected, f"slices of {width}")
    for less in ({"draws": None}, {"wants_N": None}, {"draws": None, "wants_N": None}):
        some = changed(given, **less)
        assert_same(draw_tokens(**some), by_way_of_logits(some), str([*less]))
    assert_same(draw_tokens(**given, purpose=3), by_way_of_logits(given, purpose=3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_bits_of_the_whole_logits_on_a_gpu(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    assert_same(draw_tokens(**given), by_way_of_logits(given))


@pytest.mark.parametrize("vocabulary", [1, 3, 2047, 2048, 2049, 4096, 6145])
def test_edges_of_chunks(device: str, vocabulary: int):
    """Every width of the last chunk, ties on both sides of an edge, and one row by itself."""
    g = generator(vocabulary, device)
    unembed_VD = torch.randint(-2, 3, (vocabulary, 8), generator=g, device=device).float()
    h_ND = torch.randint(-2, 3, (7, 8), generator=g, device=device).float()
    place_N = torch.arange(7, device=device)
    draws = Draws(0.25 * place_N, place_N * 77 - 100, place_N * 1000, place_N)
    given: Arguments = {"h_ND": h_ND, "unembed_VD": unembed_VD, "draws": draws, "scale": 0.5}
    given["wants_N"] = 3 - place_N % 4
    expected = by_way_of_logits(given)
    assert_same(draw_tokens(**given), expected)
    for row in range(7):
        alone = draw_tokens(
            h_ND[row : row + 1],
            unembed_VD,
            Draws(*(x_N[row : row + 1] for x_N in draws)),
            given["wants_N"][row : row + 1],
            scale=0.5,
        )
        assert_same(alone, one_row(expected, row), f"row {row}")


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_numbers_of_rows(device: str, rows: int):
    given = cases.build("tiny", torch.float32, generator(3, device))
    place_N = torch.arange(rows, device=device) % 9
    given["h_ND"] = given["h_ND"][place_N]
    given["draws"] = Draws(*(x_N[place_N] for x_N in given["draws"]))
    given["wants_N"] = given["wants_N"][place_N]
    found = draw_tokens(**given)
    assert_same(found, by_way_of_logits(given))
    assert found.ids_N.shape == (rows,)


def broken_rows(device: str) -> Arguments:
    """Logits [12, 2051]: sound, NaN, +inf, all -inf, one finite id, NaN in the last chunk; first
    without noise, then with."""
    logits_NV = torch.randn(6, 2051, generator=generator(5)).round(decimals=1)
    logits_NV[1, 5] = math.nan
    logits_NV[2, 2050] = math.inf
    logits_NV[3] = -math.inf
    logits_NV[4] = -math.inf
    logits_NV[4, 2049] = -3.0
    logits_NV[5, 2050] = math.nan
    logits_NV = logits_NV.repeat(2, 1).to(device)
    place_N = torch.arange(12, device=device)
    draws = Draws((place_N // 6).float() * 0.7, place_N, place_N, place_N)
    return {"logits_NV": logits_NV, "draws": draws, "wants_N": torch.full_like(place_N, 3)}


def test_rows_without_an_answer(device: str):
    """Each row's logits are its own weight of one column, times 1."""
    given = broken_rows(device)
    logits_NV = given.pop("logits_NV")
    for row in range(12):
        one: Arguments = {
            "h_ND": torch.ones(1, 1, device=device),
            "unembed_VD": logits_NV[row, :, None].contiguous(),
            "draws": Draws(*(x_N[row : row + 1] for x_N in given["draws"])),
            "wants_N": given["wants_N"][row : row + 1],
            "scale": 1.0,
        }
        found = draw_tokens(**one)
        assert_same(found, by_way_of_logits(one), f"row {row}")
        kind = row % 6
        assert found.raw_N is not None
        assert (int(found.ids_N) == -1) == bool(found.raw_N.isnan()) == (kind not in (0, 4)), row
        assert kind != 4 or int(found.ids_N) == 2049


def test_seeds_and_positions_decide_and_nothing_else_does(device: str):
    given = cases.build("tiny", torch.float32, generator(6, device))
    base = draw_tokens(**given).ids_N
    assert_same_bits(draw_tokens(**given).ids_N, base)
    noisy_N = given["draws"].temperature_N > 0
    for field in ("seeds_N", "positions_N", "sample_index_N"):
        moved = given["draws"]._replace(**{field: getattr(given["draws"], field) + 1})
        other = draw_tokens(**changed(given, draws=moved)).ids_N
        assert (other == base)[~noisy_N].all()
        assert (other != base)[noisy_N].sum() > 4


def test_many_rows_take_turns(monkeypatch: pytest.MonkeyPatch):
    given = cases.build("tiny", torch.float32, generator(7))
    whole = draw_tokens(**given)
    monkeypatch.setattr("suzuri.kernels.draw_tokens.MOST_ROWS", 4)
    assert_same(draw_tokens(**given), whole)
    given["wants_N"] = None
    assert_same(draw_tokens(**given), Drawn(whole.ids_N, None, None))


@pytest.mark.parametrize("rows", [1, 8, 41, 42, 64, 256, 1000, 4096])
@pytest.mark.parametrize("vocabulary", [1, 2048, 2049, 200058, 10**6])
def test_slices_cover_the_vocabulary_within_the_buffer(rows: int, vocabulary: int):
    assert slices.CHUNK == CHUNK
    found = list(slices.slices(rows, vocabulary))
    assert [first for first, _ in found[1:]] == [end for _, end in found[:-1]]
    assert found[0][0] == 0
    assert found[-1][1] == vocabulary
    assert all(first % CHUNK == 0 for first, _ in found)
    assert max(rows * (end - first) * 4 for first, end in found) <= slices.BUFFER_BYTES
    if rows * vocabulary * 4 <= slices.BUFFER_BYTES:
        assert len(found) == 1
    assert rows <= MOST_ROWS
