"""paged_attention: the bits of relative_attention, whatever the pages, pieces and neighbours."""

import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suzuri.kernels import dispatch
from suzuri.kernels.paged_attention import cases, paged_attention
from suzuri.kernels.relative_attention import relative_attention
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    Arguments,
    assert_close,
    assert_same_bits,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    widened,
)
from tests.kernels.paging import Pool, Rows, random_proj, random_rows
from tests.kernels.plain_attention import attend_rows

NOISE = {
    torch.float64: FP64_NOISE,
    torch.float32: 40 * FP32_EPS,
    torch.bfloat16: 1.01 * 2.0**-8,
}
REACH, WINDOW = 12, 8
each_window = pytest.mark.parametrize("window", [None, WINDOW])
FOUR_WAYS = {
    "at once": [24],
    "23 and 1": [23, 1],
    "by five": [5, 5, 5, 5, 4],
    "one by one": [1] * 24,
}


def at_once(rows: Rows, proj: Tensor, window: int | None) -> Tensor:
    """The whole sequence alone, without pages."""
    starts = torch.tensor([0, len(rows.q)], device=rows.q.device)
    return relative_attention(*rows, proj, starts, window=window)


def proj_for(window: int | None, rows: Rows) -> Tensor:
    return random_proj(REACH if window is None else window, rows)


def plain(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Keys gathered position by position, then attention row by row in fp64."""
    a = widened(arguments)
    size = a["k_pages_PTUC"].shape[1]
    starts = a["seq_starts_S1"].tolist()
    parts: list[tuple[Tensor, Tensor]] = []
    for s, first in enumerate(a["first_positions_S"].tolist()):
        begin, end = starts[s], starts[s + 1]
        table = a["page_table_SM"][s].tolist()
        spots = [(table[p // size], p % size) for p in range(first + end - begin)]
        k, v = (
            torch.stack([a[name][page, offset] for page, offset in spots])
            for name in ("k_pages_PTUC", "v_pages_PTUC")
        )
        q, r = a["q_NHC"][begin:end], a["r_NHB"][begin:end]
        parts.append(attend_rows(q, k, v, r, a["proj_BE"], a["window"]))
    out, size_of = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(size_of)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_attention_row_by_row(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    out_NHC = paged_attention(**arguments)
    assert out_NHC.dtype == dtype
    expected, size = plain(arguments)
    assert_close(out_NHC, expected, magnitude=size, noise=NOISE[dtype])


@each_low_dtype
@each_window
@pytest.mark.parametrize("way", FOUR_WAYS)
def test_24_tokens_in_four_ways(device: str, way: str, window: int | None, dtype: torch.dtype):
    """N01: a bias that vanishes in decode or chunked prefill."""
    rows = random_rows(24, heads=4, kv_heads=2, dtype=dtype, device=device)
    proj = proj_for(window, rows)
    expected = at_once(rows, proj, window)
    (out,) = Pool([rows], proj, window, page_size=16).run(*([n] for n in FOUR_WAYS[way]))
    assert_same_bits(out, expected)
    without_bias = at_once(rows, torch.zeros_like(proj), window)
    assert ((expected - without_bias).abs() > 0.1).flatten(1).any(-1)[1:].all()


@each_window
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 128])
def test_page_sizes(device: str, page_size: int, window: int | None):
    rows = random_rows(150, device=device)
    proj = proj_for(window, rows)
    pool = Pool([rows], proj, window, page_size)
    (out,) = pool.run([60], [1], [3], [64], *([[1]] * 13), [9])
    assert_same_bits(out, at_once(rows, proj, window))


@each_window
def test_a_ragged_batch_equals_each_sequence_alone(device: str, window: int | None):
    """N03, in prefill and again when every sequence gets one more row."""
    lengths = [1, 7, 33, 2, 1, 129]
    sequences = [random_rows(n + 1, seed=i, device=device) for i, n in enumerate(lengths)]
    proj = proj_for(window, sequences[0])
    pool = Pool(sequences, proj, window, page_size=16)
    for rows, out in zip(sequences, pool.run(lengths, [1] * 6), strict=True):
        assert_same_bits(out, at_once(rows, proj, window), f"length {len(rows.q)}")


@each_window
def test_decode_prefill_verify_and_idle_sequences_share_a_batch(device: str, window: int | None):
    lengths = [70, 40, 90, 30]
    sequences = [random_rows(n, seed=n, device=device) for n in lengths]
    proj = proj_for(window, sequences[0])
    steps: Sequence[Sequence[int]] = [[61, 0, 80, 0], [9, 33, 1, 30], [0, 1, 9, 0], [0, 6, 0, 0]]
    out = Pool(sequences, proj, window, page_size=7).run(*steps)
    for rows, mixed in zip(sequences, out, strict=True):
        assert_same_bits(mixed, at_once(rows, proj, window), f"length {len(rows.q)}")


@pytest.mark.parametrize("length", [253, 361, 505, 541, 721, 1009, 1441])
@pytest.mark.parametrize("window", [None, 300])
def test_lengths_that_leave_odd_last_chunks(device: str, length: int, window: int | None):
    """N05: prefill in chunks of 512 and of 256 against the whole prompt."""
    rows = random_rows(length, channels=4, device=device)
    proj = random_proj(300, rows)
    expected = at_once(rows, proj, window)
    for chunk in (512, 256):
        steps = [[min(chunk, length - start)] for start in range(0, length, chunk)]
        (out,) = Pool([rows], proj, window, page_size=64).run(*steps)
        assert_same_bits(out, expected, f"chunk {chunk}")


@pytest.mark.parametrize(("distance", "influences"), [(7, True), (8, False), (9, False)])
def test_the_window_counts_the_token_itself(device: str, distance: int, influences: bool):
    """N07, in decode."""
    rows = random_rows(21, heads=1, device=device)
    planted = Rows(*(x.clone() for x in rows))
    planted.k[20 - distance] = 50 * rows.q[20].sign()
    planted.v[20 - distance] = 7.0
    proj = torch.zeros_like(random_proj(WINDOW, rows))
    (before,), (after,) = (
        Pool([x], proj, WINDOW, page_size=16).run([20], [1]) for x in (rows, planted)
    )
    assert (before[20].abs() < 5).all()
    assert_same_bits(after[20], torch.full_like(after[20], 7.0) if influences else before[20])


@pytest.mark.parametrize("context", [20, 130])
def test_the_bias_ends_at_its_reach_in_decode(device: str, context: int):
    """A huge bias in its last place, 12 keys back: exactly that key's value comes out."""
    rows = random_rows(context, heads=2, dtype=torch.float32, device=device)
    rows.q.zero_()
    rows.r.fill_(1.0)
    proj = torch.zeros(3, REACH, device=device)
    proj[:, -1] = 40.0
    (out,) = Pool([rows], proj, None, page_size=16).run([context - 1], [1])
    expected = rows.v[context - REACH].double().expand(2, -1)
    assert_close(out[-1], expected, ulps=4)


def test_a_row_for_no_sequence_is_zero(device: str):
    arguments: Arguments = cases.build("tiny_global", torch.float32, generator(2, device))
    expected = paged_attention(**arguments)
    for name in ("q_NHC", "r_NHB"):
        arguments[name] = torch.cat([arguments[name], arguments[name][:2]])
    out = paged_attention(**arguments)
    assert_same_bits(out[:-2], expected)
    assert_same_bits(out[-2:], torch.zeros_like(out[-2:]))


class LargestAllocation(TorchDispatchMode):
    """Records the most elements in one freshly allocated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                held = x.untyped_storage().nbytes() // x.element_size()
                self.elements = max(self.elements, held)
        return out


def of_one_sequence(new_rows: int, context: int, reach: int) -> list[Tensor]:
    """Arguments of one sequence with one head of 4 channels."""
    rows = random_rows(new_rows, heads=1, channels=4)
    pages = torch.zeros(context // 128, 128, 1, 4, dtype=torch.bfloat16)
    table = torch.arange(len(pages))[None]
    first, starts = torch.tensor([context - new_rows]), torch.tensor([0, new_rows])
    return [rows.q, rows.r, random_proj(reach, rows), pages, pages, table, first, starts]


def largest_allocation(new_rows: int, context: int, reach: int, window: int | None) -> int:
    """Of the reference."""
    given = of_one_sequence(new_rows, context, reach)
    with dispatch.force("reference"), LargestAllocation() as largest:
        paged_attention(*given, window=window)
    return largest.elements


def test_the_workspace_is_bounded_by_the_band():
    """N26: no rows x context matrix. 64 rows are handled at a time."""
    band = 64 * (256 + 64)
    short = largest_allocation(64, 2048, reach=256, window=None)
    assert short <= band
    assert short == largest_allocation(64, 8192, reach=256, window=None)
    assert short == largest_allocation(192, 2048, reach=256, window=None)


def test_the_workspace_of_1024_rows_at_262144_tokens():
    """N26 at full length, through the window: the band, not the rows, nor the context."""
    assert largest_allocation(1024, 262_144, reach=512, window=512) <= 64 * (512 + 64)


@pytest.mark.slow
def test_the_workspace_of_a_global_layer_at_262144_tokens():
    """N26 over every key, for one block of rows: a chunk of 1,024 is 16 such, one by one."""
    assert largest_allocation(64, 262_144, reach=256, window=None) <= 64 * (256 + 64)


@pytest.mark.parametrize("context", [8192, 65_536])
def test_the_arrays_of_the_cpu_path_are_bounded(context: int):
    """N26: a few tiles, whatever the context; the result is 64 rows."""
    given = of_one_sequence(64, context, reach=256)
    paged_attention(*given, window=None)  # compiles, which takes memory of its own
    tracemalloc.start()
    paged_attention(*given, window=None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_workspace_probe_sees_a_whole_matrix():
    with LargestAllocation() as largest:
        x = torch.ones(30, 4)
        torch.softmax(x @ torch.ones(4, 500), -1)[:, :2].clone()
    assert largest.elements == 30 * 500


def test_heads_that_do_not_divide_are_refused():
    arguments: Arguments = cases.build("tiny_global", torch.float32, generator(4))
    arguments["q_NHC"] = arguments["q_NHC"][:, :3]
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        paged_attention(**arguments)
