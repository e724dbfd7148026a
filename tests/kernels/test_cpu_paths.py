"""What runs on a CPU where no gradient is recorded, cpu.py of an op and the short cuts of exact.py,
has the bits of the reference, on one thread or two, in every layout."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.grouped_gemm import cases as grouped
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.kv_write import cases as writing
from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.moe_combine import cases as combining
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_experts import cases as experts_cases
from suzuri.kernels.moe_experts import moe_experts
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.paged_attention import cases as paged
from suzuri.kernels.paged_attention import paged_attention
from suzuri.kernels.relative_attention import cases as relative
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.rms_norm import cases as norms
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.router import cases as routing
from suzuri.kernels.router import router
from suzuri.kernels.short_conv import cases as convs
from suzuri.kernels.short_conv import short_conv
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    each_dtype,
    each_low_dtype,
    generator,
    threads,
)
from tests.kernels.forward_ops import FORWARD_OPS, Draw
from tests.kernels.rows import LAYOUTS, TOTAL

CPU = torch.device("cpu")
LINES = 64
"""Of paged_attention/cpu.py."""
EXTREMES = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3e38)


def tuple_of(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def assert_as_reference(run: Callable[[], Tensor | tuple[Tensor, ...]]) -> None:
    """Against the reference as training runs it, with its autograd Functions."""
    with dispatch.force("reference"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "records_gradient", lambda *tensors: True)
        expected = tuple_of(run())
    for num_threads in (1, 2):
        with threads(num_threads):
            for found, wanted in zip(tuple_of(run()), expected, strict=True):
                assert_same_bits(found, wanted, f"{num_threads} threads")


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", FORWARD_OPS)
def test_every_forward_op(op: str, layout: str, dtype: torch.dtype):
    run = FORWARD_OPS[op](Draw(dtype, "cpu", LAYOUTS[layout]))
    for rows in (slice(0, TOTAL), slice(0, 1), slice(3, 20)):
        assert_as_reference(lambda rows=rows: run(rows))


def small(shapes: Iterable[str]) -> list[str]:
    return [name for name in shapes if not name.startswith("inkling")]


@each_dtype
@pytest.mark.parametrize("case", small(paged.SHAPES))
def test_paged_attention(case: str, dtype: torch.dtype):
    arguments: Arguments = paged.build(case, dtype, generator(1))
    assert_as_reference(lambda: paged_attention(**arguments))


@each_dtype
@pytest.mark.parametrize("case", small(relative.SHAPES))
def test_relative_attention(case: str, dtype: torch.dtype):
    arguments: Arguments = relative.build(case, dtype, generator(16))
    assert_as_reference(lambda: relative_attention(**arguments))


@each_low_dtype
@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("size", [7, 64, 128])
def test_paged_attention_over_chunks_of_very_different_lengths(
    size: int, window: int | None, dtype: torch.dtype
):
    """Chunk boundaries at 256 and 512 fall on other steps of each sequence; some have no step."""
    g = generator(size)
    first = torch.tensor([0, 1100, 63, 255, 256, 511, 512, 700, 5])
    pages = -(-1200 // size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    for rows in ([1] * 9, [2, 1, 3, 1, 70, 1, 1, 2, 0]):
        total = sum(rows)
        given = (normal(total, 4, 20), normal(total, 4, 3), normal(3, 40))
        pools = (normal(40, size, 2, 20), normal(40, size, 2, 20))
        table = torch.randint(40, (9, pages), generator=g)
        starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])
        assert_as_reference(
            lambda given=given, pools=pools, table=table, starts=starts: paged_attention(
                *given, *pools, table, first, starts, window=window
            )
        )


@each_low_dtype
@pytest.mark.parametrize("window", [None, 5, 100, 300])
@pytest.mark.parametrize("heads", [(4, 1, 16), (8, 2, 32), (3, 3, 20), (5, 1, 7)])
def test_relative_attention_at_the_edges_of_blocks(
    heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
):
    """Blocks of 12, 16, 21 or 64 rows, one fewer and one more, and several sequences."""
    query_heads, kv_heads, channels = heads
    block = LINES * kv_heads // query_heads
    lengths = [block - 1, block, 0, block + 1, 1, 2 * block + 1, 63, 65, 530]
    g = generator(block)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    total = sum(lengths)
    q, r = normal(total, query_heads, channels) * channels**0.5, normal(total, query_heads, 3)
    k, v = normal(total, kv_heads, channels), normal(total, kv_heads, channels)
    proj, starts = normal(3, 90), torch.tensor([0, *lengths]).cumsum(0)
    assert_as_reference(lambda: relative_attention(q, k, v, r, proj, starts, window=window))


@each_low_dtype
@pytest.mark.parametrize("window", [None, 9, 270])
@pytest.mark.parametrize("size", [1, 4, 128])
def test_paged_attention_in_blocks_that_begin_anywhere(
    size: int, window: int | None, dtype: torch.dtype
):
    """Chunk boundaries (256, 512) and tiles inside of a block; windows that begin inside a tile."""
    g = generator(size)
    first, rows = torch.tensor([250, 505, 40, 0, 511]), [17, 33, 31, 32, 1]
    total, pages = sum(rows), -(-600 // size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    given = (normal(total, 4, 16), normal(total, 4, 3), normal(3, 40))
    pools = (normal(40, size, 2, 16), normal(40, size, 2, 16))
    table = torch.randint(40, (5, pages), generator=g)
    starts = torch.tensor([0, *rows]).cumsum(0)
    assert_as_reference(
        lambda: paged_attention(*given, *pools, table, first, starts, window=window)
    )


@each_low_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 6])
def test_what_a_row_cannot_see_may_be_no_number(
    window: int | None, value: float, dtype: torch.dtype
):
    """A later row of its block, or one that slid out of its window, in keys and in values."""
    g = generator(18)
    q, k, v, r = (torch.randn(150, n, 16, generator=g).to(dtype) for n in (4, 2, 2, 4))
    starts, proj = torch.tensor([0, 70, 150]), torch.randn(16, 12, generator=g).to(dtype)

    def run() -> Tensor:
        return relative_attention(q, k, v, r, proj, starts, window=window)

    expected, at = run(), 90
    for x in (k, v):
        good = x[at].clone()
        x[at] = value
        found = run()
        x[at] = good
        end = 150 if window is None else at + window
        assert_same_bits(found[:at], expected[:at])
        assert_same_bits(found[end:], expected[end:])
        if x is v or value != -math.inf:
            assert not found[at:end].isfinite().flatten(1).all(1).any()


@each_dtype
@pytest.mark.parametrize("case", small(convs.SHAPES))
@pytest.mark.parametrize("spare", [0, 1, 4])
def test_short_conv_with_state(case: str, spare: int, dtype: torch.dtype):
    arguments: Arguments = convs.build(case, dtype, generator(2))
    num_seqs, (channels, taps) = len(arguments["seq_starts_S1"]) - 1, arguments["weight_CK"].shape
    state = torch.randn(num_seqs + 2, taps - 1 + spare, channels, generator=generator(3)).to(dtype)
    slots = torch.randperm(num_seqs + 2, generator=generator(4))[:num_seqs]
    for later in (0, 1, 5):
        positions = arguments["positions_N"] + later * (arguments["seq_ids_N"] + 1)
        given = changed(arguments, positions_N=positions, slots_S=slots)

        def run(given: Arguments = given) -> tuple[Tensor, Tensor]:
            kept = state.clone()
            return short_conv(**given, state_LRC=kept), kept

        if state.shape[1]:
            assert_as_reference(run)


@each_dtype
@pytest.mark.parametrize("case", small(grouped.SHAPES))
def test_grouped_gemm(case: str, dtype: torch.dtype):
    arguments: Arguments = grouped.build(case, dtype, generator(5))
    for out_dtype in (dtype, torch.float32):
        assert_as_reference(lambda out=out_dtype: grouped_gemm(**arguments, out_dtype=out))


@pytest.mark.parametrize("counts", [[40] * 6, [1, 0, 0, 2], [0] * 60 + [90], [300, 3], [0, 0]])
@pytest.mark.parametrize(("k", "out"), [(32, 16), (64, 64), (200, 130), (128, 512)])
def test_grouped_gemm_whether_the_experts_run_together_or_in_a_loop(
    k: int, out: int, counts: list[int]
):
    g = generator(k + sum(counts))
    x = torch.randn(sum(counts), k, generator=g)
    weight = torch.nn.Parameter(torch.randn(len(counts), out, k, generator=g), requires_grad=False)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    assert_as_reference(lambda: grouped_gemm(x, weight, offsets, out_dtype=torch.float32))


@each_dtype
@pytest.mark.parametrize("case", small(combining.SHAPES))
def test_moe_combine(case: str, dtype: torch.dtype):
    drawn: Arguments = combining.build(case, dtype, generator(6))
    order = drawn["order_M"]
    permutation = Permutation(order, order.argsort(), torch.zeros(0, dtype=torch.int64))
    given = (drawn["y_MD"], permutation, drawn["weights_NJ"])
    assert_as_reference(lambda: moe_combine(*given, out_dtype=dtype))


@each_dtype
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("case", small(writing.SHAPES))
def test_kv_write(case: str, all_rows: bool, dtype: torch.dtype):
    arguments: Arguments = writing.build(case, dtype, generator(7))
    if all_rows:
        kept = arguments["slots_N"] >= 0
        rows = {name: arguments[name][kept] for name in ("k_NUC", "v_NUC", "slots_N")}
        arguments = arguments | rows

    def run() -> tuple[Tensor, Tensor]:
        pages = (arguments["k_pages_PTUC"].clone(), arguments["v_pages_PTUC"].clone())
        kv_write(arguments["k_NUC"], arguments["v_NUC"], *pages, arguments["slots_N"])
        return pages

    assert_as_reference(run)


@each_dtype
@pytest.mark.parametrize("case", norms.SHAPES)
def test_rms_norm(case: str, dtype: torch.dtype):
    arguments: Arguments = norms.build(case, dtype, generator(8))
    assert_as_reference(lambda: rms_norm(**arguments, eps=1e-6))


def test_numbers_that_are_none_and_tiny_ones():
    """The same values (a NaN is a NaN), and no warning from NumPy."""
    x = torch.randn(7, 45, generator=generator(9))
    for row, value in enumerate(EXTREMES):
        x[row, 3 * row] = value
    weight = torch.ones(45)
    with dispatch.force("reference"):
        expected = rms_norm(x, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_gradient_takes_the_loops_too():
    """An op with a gradient runs what it runs without; forced, the reference and its autograd."""
    arguments: Arguments = norms.build("odd", torch.float32, generator(10)) | {"eps": 1e-6}
    x = arguments["x_ND"].clone().requires_grad_()
    found = rms_norm(x, arguments["weight_D"], 1e-6)
    assert_same_bits(found.detach(), rms_norm(**arguments))
    with dispatch.force("reference"):
        forced = rms_norm(x, arguments["weight_D"], 1e-6)
    assert type(found.grad_fn).__name__ == "RMSNormBackward"
    assert type(forced.grad_fn).__name__ == "MulBackward0"


def test_pages_that_are_no_block_of_memory_are_written_all_the_same():
    """A view cannot be flattened in place: the reference writes it."""
    arguments: Arguments = writing.build("tiny", torch.float32, generator(11))
    pages = [arguments[name].clone() for name in ("k_pages_PTUC", "v_pages_PTUC")]
    strided = [torch.stack([page, page], -1)[..., 0] for page in pages]
    given = (arguments["k_NUC"], arguments["v_NUC"])
    kv_write(*given, pages[0], pages[1], arguments["slots_N"])
    kv_write(*given, strided[0], strided[1], arguments["slots_N"])
    for found, wanted in zip(strided, pages, strict=True):
        assert_same_bits(found, wanted)


def test_small_work_runs_on_one_thread_and_gives_the_threads_back():
    with threads(2):
        with dispatch.threads_for(dispatch.SMALL, CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with dispatch.threads_for(dispatch.SMALL + 1, CPU):
            assert torch.get_num_threads() == 2
        with dispatch.threads_for(1, torch.device("meta")):
            assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError, match="inside"), dispatch.threads_for(1, CPU):
            raise RuntimeError("inside")
        assert torch.get_num_threads() == 2


def test_an_index_from_outside_is_refused_before_anything_is_read_or_written():
    """The loops check no bounds themselves: without this a wrong id would corrupt memory."""
    for wrong in (-1, 10, 1 << 40):
        given: Arguments = experts_cases.build("tiny", torch.float32, generator(12))
        given["experts_NK"][3, 1] = wrong
        with pytest.raises(IndexError):
            moe_experts(**given)
        with pytest.raises(IndexError):
            moe_permute(given["x_ND"], given["experts_NK"], num_experts=8)
    writes: Arguments = writing.build("tiny", torch.float32, generator(13))
    writes["slots_N"][2] = 5 * 4
    with pytest.raises(IndexError):
        kv_write(**writes)
    reads: Arguments = paged.build("tiny_global", torch.float32, generator(14))
    for wrong in (-1, len(reads["k_pages_PTUC"])):
        table = reads["page_table_SM"].clone()
        table[:, 0] = wrong
        with pytest.raises(IndexError):
            paged_attention(**changed(reads, page_table_SM=table))
    conv: Arguments = convs.build("tiny", torch.float32, generator(15))
    state = torch.zeros(4, 3, conv["x_NC"].shape[1])
    for wrong in (-1, 4):
        with pytest.raises(IndexError):
            short_conv(**conv, state_LRC=state, slots_S=torch.tensor([0, 1, 2, wrong]))
    assert not state.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x_ND", "weight_ED", "bias_R"])
def test_a_router_chooses_as_the_reference_among_numbers_that_are_none(where: str, value: float):
    given: Arguments = routing.build("tiny", torch.float32, generator(17))
    given[where][..., 3] = value
    with dispatch.force("reference"):
        ids, weights, _ = router(**given)
    found, found_weights, _ = router(**given)
    assert torch.equal(found, ids)
    assert_same_bits(found_weights.nan_to_num(7.0), weights.nan_to_num(7.0))
