"""relative_attention against attention written row by row in fp64."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.relative_attention import cases, relative_attention
from suzuri.kernels.relative_attention.reference import CHUNK_GLOBAL, CHUNK_LOCAL, TILE
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    Arguments,
    assert_close,
    assert_same_bits,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
    ulp,
    widened,
)
from tests.kernels.paging import Rows, random_proj, random_rows
from tests.kernels.plain_attention import attend_by_the_contract, attend_packed

TRAINED = ["q_NHC", "k_NUC", "v_NUC", "r_NHB", "proj_BE"]
NOISE = {
    torch.float64: FP64_NOISE,
    # Scores up to about 10 are rounded before exp.
    torch.float32: 40 * FP32_EPS,
    # Every weight is rounded to 8 bits before it meets its value.
    torch.bfloat16: 1.01 * 2.0**-8,
}


def packed(sequences: list[Rows], proj: Tensor, window: int | None, *, extra: int = 0) -> Arguments:
    """Arguments for several sequences, and `extra` rows that belong to none."""
    lengths = [len(rows.q) for rows in sequences]
    padding = [Rows(*(x.new_ones(extra, *x.shape[1:]) for x in sequences[0]))]
    q, k, v, r = (torch.cat(parts) for parts in zip(*sequences, *padding, strict=True))
    return {
        "q_NHC": q,
        "k_NUC": k,
        "v_NUC": v,
        "r_NHB": r,
        "proj_BE": proj,
        "seq_starts_S1": torch.tensor([0, *lengths], device=q.device).cumsum(0),
        "window": window,
    }


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_attention_row_by_row(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    out_NHC = relative_attention(**arguments)
    assert out_NHC.dtype == dtype
    expected, size = attend_packed(**widened(arguments))
    assert_close(out_NHC, expected, magnitude=size, noise=NOISE[dtype])


@pytest.mark.parametrize("window", [None, 300])
def test_weights_are_rounded_relative_to_the_running_max_of_their_tile(
    device: str, window: int | None
):
    """The rounding points, tile and chunk of the contract reproduce nearly every output value to
    one rounding; each other choice misses many."""
    assert (TILE, CHUNK_GLOBAL, CHUNK_LOCAL) == (64, 512, 256)
    rows = random_rows(700, device=device)
    proj = random_proj(300, rows)
    out_NHC = relative_attention(**packed([rows], proj, window))

    def share_explained(tile: int, chunk: int, dtype: torch.dtype) -> float:
        good: list[Tensor] = []
        for end in range(540, 700, 4):
            q, k, v, r = (x[:end].double() for x in rows)
            exact = attend_by_the_contract(
                *(q[-1], k, v, r[-1], proj.double(), window), tile=tile, chunk=chunk, dtype=dtype
            )
            error = (out_NHC[end - 1].double() - exact).abs()
            good.append(error <= 0.51 * ulp(exact, torch.bfloat16))
        return float(torch.stack(good).double().mean())

    chunk = 512 if window is None else 256
    assert share_explained(64, chunk, torch.bfloat16) > 0.99
    assert share_explained(64, chunk, torch.float64) < 0.9
    assert share_explained(64, 1 << 20, torch.bfloat16) < 0.97
    assert share_explained(1 << 20, 1 << 20, torch.bfloat16) < 0.97


@pytest.mark.parametrize("window", [None, 8])
def test_a_batch_equals_each_sequence_alone(device: str, window: int | None):
    """N03: ragged lengths in one batch."""
    lengths = [1, 7, 33, 2, 1, 129]
    sequences = [random_rows(n, seed=i, device=device) for i, n in enumerate(lengths)]
    proj = random_proj(8 if window else 20, sequences[0])
    together = relative_attention(**packed(sequences, proj, window)).split(lengths)
    for rows, out in zip(sequences, together, strict=True):
        alone = relative_attention(**packed([rows], proj, window))
        assert_same_bits(out, alone, f"length {len(rows.q)}")


@each_dtype
def test_a_row_depends_on_nothing_after_it(device: str, dtype: torch.dtype):
    rows = random_rows(140, dtype=dtype, device=device)
    proj = random_proj(20, rows)
    whole = relative_attention(**packed([rows], proj, None))
    for end in (1, 63, 64, 65, 127, 128, 129):
        part = Rows(*(x[:end] for x in rows))
        assert_same_bits(relative_attention(**packed([part], proj, None)), whole[:end])


def test_empty_sequences_and_rows_of_no_sequence(device: str):
    sequences = [random_rows(n, seed=n, device=device) for n in (0, 5, 0, 3, 0)]
    proj = random_proj(4, sequences[1])
    out = relative_attention(**packed(sequences, proj, None, extra=2))
    kept = [sequences[1], sequences[3]]
    assert_same_bits(out[:8], relative_attention(**packed(kept, proj, None)))
    assert_same_bits(out[8:], torch.zeros_like(out[8:]))


@pytest.mark.parametrize(("distance", "influences"), [(7, True), (8, False), (9, False)])
def test_the_window_counts_the_token_itself(device: str, distance: int, influences: bool):
    """N07: a key with a huge score at distances 7, 8 and 9 of a window of 8."""
    rows = random_rows(24, heads=1, device=device)
    proj = torch.zeros_like(random_proj(8, rows))
    planted = Rows(*(x.clone() for x in rows))
    planted.k[20 - distance] = 50 * rows.q[20].sign()
    planted.v[20 - distance] = 7.0
    before = relative_attention(**packed([rows], proj, 8))[20]
    after = relative_attention(**packed([planted], proj, 8))[20]
    if influences:
        assert_same_bits(after, torch.full_like(after, 7.0))
        assert (before.abs() < 5).all()
    else:
        assert_same_bits(after, before)


@pytest.mark.parametrize("reach", [1, 5, 64])
def test_the_bias_ends_at_its_reach(device: str, reach: int):
    """A huge bias in the last place lifts the key at that distance and no farther one."""
    rows = random_rows(70, heads=1, channels=4, device=device, dtype=torch.float32)
    rows.q.zero_()
    rows.r.fill_(1.0)
    proj = torch.zeros(3, reach, device=device)
    proj[:, -1] = 40.0
    out_NHC = relative_attention(**packed([rows], proj, None))
    assert_close(out_NHC[reach - 1 :], rows.v[: 71 - reach].double(), ulps=4)
    # Rows that reach no such key see all their keys alike.
    count = torch.arange(1, reach, device=device)
    mean = rows.v[: reach - 1].double().cumsum(0) / count[:, None, None]
    assert_close(out_NHC[: reach - 1], mean, noise=1e-6, magnitude=torch.ones_like(mean))


def test_scores_are_divided_by_the_channels_and_the_bias_is_not(device: str):
    """Two keys: weights 1 : exp(12 / 4 - 2.5)."""
    q = torch.full((2, 1, 4), 3.0, device=device)
    k = torch.tensor([[[1.0] * 4], [[0.0] * 4]], device=device)
    v = torch.tensor([[[1.0] * 4], [[0.0] * 4]], device=device)
    r = torch.ones(2, 1, 1, device=device)
    proj = torch.tensor([[2.5, 0.0]], device=device)
    out = relative_attention(**packed([Rows(q, k, v, r)], proj, None))
    share = 1 / (1 + torch.exp(torch.tensor(-0.5, dtype=torch.float64, device=device)))
    assert_close(out[1, 0], share.expand(4), ulps=4)


def test_query_heads_share_kv_heads_in_runs(device: str):
    rows = random_rows(5, heads=6, kv_heads=3, channels=4, device=device)
    rows.v.copy_(torch.tensor([1.0, 2.0, 4.0], device=device)[None, :, None].expand(5, 3, 4))
    out = relative_attention(**packed([rows], random_proj(4, rows), None))
    expected = torch.tensor([1.0, 1.0, 2.0, 2.0, 4.0, 4.0], device=device)
    assert_close(out, expected.double()[None, :, None].expand(5, 6, 4), noise=NOISE[out.dtype])


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_those_of_finite_differences(window: int | None):
    sequences = [
        random_rows(n, kv_heads=1, channels=2, width=2, dtype=torch.float64, seed=n) for n in (4, 1)
    ]
    arguments = packed(sequences, random_proj(3, sequences[0]), window, extra=1)
    check_gradients(relative_attention, arguments, TRAINED)


@pytest.mark.parametrize("case", ["tiny_global", "tiny_local", "long_global", "long_local"])
def test_gradients_agree_with_attention_row_by_row(case: str):
    arguments: Arguments = cases.build(case, torch.float64, generator(2))
    ours = gradients(relative_attention, arguments, TRAINED)
    theirs = gradients(lambda **rest: attend_packed(**rest)[0], arguments, TRAINED)
    for name, a, b in zip(TRAINED, ours, theirs, strict=True):
        error = (a - b).abs().max() / b.abs().max()
        assert error < 1e-11, name


@each_low_dtype
@pytest.mark.parametrize("case", ["odd_global", "odd_local"])
def test_gradients_in_the_dtype_of_their_tensors(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(3, device))
    check_low_precision_gradients(relative_attention, arguments, TRAINED)


def test_heads_that_do_not_divide_are_refused():
    arguments: Arguments = cases.build("tiny_global", torch.float32, generator(4))
    arguments["q_NHC"] = arguments["q_NHC"][:, :3]
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        relative_attention(**arguments)
