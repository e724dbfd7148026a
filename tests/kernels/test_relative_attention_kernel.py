"""The Triton kernel of relative_attention: interpreted (fp32, close) and on a GPU (bits)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from suzuri.kernels import dispatch
from suzuri.kernels.relative_attention import cases, kernel, relative_attention
from tests.kernels.compare import (
    FP32_EPS,
    Arguments,
    assert_close,
    assert_same_bits,
    generator,
    widened,
)
from tests.kernels.paging import Rows, random_proj, random_rows
from tests.kernels.plain_attention import attend_packed
from tests.kernels.triton_interpreter import patch_loop_bounds

NOISE = {
    # Relative to the sum of |weight * value|. Scores up to 10 carry a few ulps each from sums over
    # 128 channels in order, and exp2 is good to 2 ulps.
    torch.float32: 400 * FP32_EPS,
    # Every weight is rounded to 8 bits before it meets its value.
    torch.bfloat16: 1.02 * 2.0**-8,
}
SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]
on_gpu = pytest.mark.gpu
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
LAYERS = {"global": (64, 8, 1024, None), "local": (64, 16, 512, 512)}
"""Inkling's: heads, KV heads, reach, window."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops can be interpreted, and every buffer that a kernel allocates starts as NaN."""
    patch_loop_bounds(monkeypatch)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def run(arguments: Arguments, **changes: Any) -> Tensor:
    """The kernel, with another launch where `changes` say so."""
    q, k, v = (arguments[name] for name in ("q_NHC", "k_NUC", "v_NUC"))
    shape = kernel.shape_of(q, k.shape[1], arguments["proj_BE"], arguments["window"])
    launch = kernel.launch_of(shape, tma=kernel.can_tma(k, v))
    return kernel.relative_attention(**arguments, launch=dataclasses.replace(launch, **changes))


def packed(sequences: list[Rows], proj: Tensor, window: int | None, *, extra: int = 0) -> Arguments:
    """Several sequences, and `extra` rows of NaN that belong to none."""
    lengths = [len(rows.q) for rows in sequences]
    nan = [Rows(*(x.new_full((extra, *x.shape[1:]), torch.nan) for x in sequences[0]))]
    q, k, v, r = (torch.cat(parts) for parts in zip(*sequences, *nan, strict=True))
    return {
        "q_NHC": q,
        "k_NUC": k,
        "v_NUC": v,
        "r_NHB": r,
        "proj_BE": proj,
        "seq_starts_S1": torch.tensor([0, *lengths], device=q.device).cumsum(0),
        "window": window,
    }


def inkling_rows(length: int, layer: str, dtype: torch.dtype, seed: int = 0) -> Rows:
    heads, kv_heads, _, _ = LAYERS[layer]
    return random_rows(
        length,
        heads=heads,
        kv_heads=kv_heads,
        channels=128,
        width=16,
        dtype=dtype,
        seed=seed,
        device="cuda",
    )


def check_against_plain(arguments: Arguments) -> None:
    dtype = arguments["q_NHC"].dtype
    expected, size = attend_packed(**widened(arguments))
    assert_close(run(arguments), expected, magnitude=size, noise=NOISE[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
@pytest.mark.parametrize("case", [name for name in SMALL if not name.startswith("long")])
def test_interpreted(case: str):
    check_against_plain(cases.build(case, torch.float32, generator(1)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
def test_interpreted_descriptors():
    """Keys by the bulk copy engine; the last tile of a sequence holds values of the next."""
    sequences = [
        random_rows(n, heads=4, kv_heads=2, channels=16, seed=n, dtype=torch.float32)
        for n in (70, 30)
    ]
    arguments = packed(sequences, random_proj(40, sequences[0]), None)
    expected, size = attend_packed(**widened(arguments))
    out = run(arguments, tma=True, tokens=4)
    assert_close(out, expected, magnitude=size, noise=NOISE[torch.float32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, in the interpreter")
@pytest.mark.parametrize("window", [None, 70])
def test_interpreted_ragged_with_rows_of_no_sequence(window: int | None):
    sequences = [
        random_rows(n, heads=3, kv_heads=1, seed=i, dtype=torch.float32)
        for i, n in enumerate([0, 5, 1, 0, 131, 0])
    ]
    proj = random_proj(40, sequences[1])
    arguments = packed(sequences, proj, window, extra=9)
    out = run(arguments, tokens=4)
    assert_same_bits(out[-9:], torch.zeros_like(out[-9:]))
    real = [rows for rows in sequences if len(rows.q)]
    expected, size = attend_packed(**widened(packed(real, proj, window)))
    assert_close(out[:-9], expected, magnitude=size, noise=NOISE[torch.float32])


def test_what_no_kernel_covers_is_refused_by_name():
    arguments: Arguments = cases.build("tiny_global", torch.float64, generator(1))
    with pytest.raises(NotImplementedError, match="float64"):
        kernel.relative_attention(**arguments)


@on_gpu
@each_dtype
@pytest.mark.parametrize("case", list(cases.SHAPES))
def test_against_attention_row_by_row(case: str, dtype: torch.dtype):
    check_against_plain(cases.build(case, dtype, generator(1, "cuda")))


@on_gpu
@each_dtype
@pytest.mark.parametrize("case", list(cases.SHAPES))
def test_against_the_reference(case: str, dtype: torch.dtype):
    """Both round every weight to the dtype once: the median difference is far below that."""
    arguments: Arguments = cases.build(case, dtype, generator(2, "cuda"))
    with dispatch.force("reference"):
        expected = relative_attention(**arguments).double()
    _, size = attend_packed(**widened(arguments))
    error = ((relative_attention(**arguments).double() - expected).abs() / size).flatten()
    assert error.max() < (2.0**-7 if dtype == torch.bfloat16 else 1000 * FP32_EPS)
    assert error.median() < (2.0**-12 if dtype == torch.bfloat16 else 40 * FP32_EPS)


@on_gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_no_launch_changes_a_bit(layer: str):
    """Tile of rows, warps, stages, copy engine."""
    _, _, reach, window = LAYERS[layer]
    rows = inkling_rows(1500, layer, torch.bfloat16)
    arguments = packed([rows], random_proj(reach, rows), window)
    expected = run(arguments)
    tokens = (1, 2, 8) if window is None else (4, 8, 16)
    for changes in (
        {},
        {"tma": False, "far_stages": 2, "near_stages": 1},
        {"tma": False},
        {"warps": 8},
        *({"tokens": n, "near_stages": 1} for n in tokens),
    ):
        assert_same_bits(run(arguments, **changes), expected, f"{changes}")


@on_gpu
@pytest.mark.parametrize("case", ["odd_global", "long_local", "tiny_local"])
@each_dtype
def test_no_launch_changes_a_bit_of_small_heads(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(3, "cuda"))
    expected = run(arguments)
    for tokens in (1, 2, 4) if dtype == torch.bfloat16 else (1, 2):
        for warps in (2, 4):
            out = run(arguments, tokens=tokens, warps=warps)
            assert_same_bits(out, expected, f"{tokens} tokens, {warps} warps")


@on_gpu
@each_dtype
@pytest.mark.parametrize("layer", LAYERS)
def test_a_batch_equals_each_sequence_alone(layer: str, dtype: torch.dtype):
    """N03: ragged, with empty sequences and rows of no sequence, which may hold NaN."""
    _, _, reach, window = LAYERS[layer]
    lengths = [1, 700, 0, 33, 64, 0, 577, 9]
    sequences = [inkling_rows(n, layer, dtype, seed=i) for i, n in enumerate(lengths)]
    proj = random_proj(reach, sequences[1])
    out = run(packed(sequences, proj, window, extra=21))
    assert_same_bits(out[-21:], torch.zeros_like(out[-21:]))
    for rows, part in zip(sequences, out[:-21].split(lengths), strict=True):
        assert_same_bits(part, run(packed([rows], proj, window)), f"length {len(rows.q)}")


@on_gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_what_comes_after_a_sequence_may_be_nan(layer: str):
    """The values of a neighbour share the last tile of keys."""
    _, _, reach, window = LAYERS[layer]
    first, second = (inkling_rows(n, layer, torch.bfloat16, seed=n) for n in (101, 30))
    proj = random_proj(reach, first)
    expected = run(packed([first], proj, window))
    poisoned = Rows(*(torch.full_like(x, torch.nan) for x in second))
    out = run(packed([first, poisoned], proj, window))
    assert_same_bits(out[:101], expected)


@on_gpu
def test_weights_written_in_place_are_followed():
    rows = inkling_rows(70, "global", torch.bfloat16)
    proj = random_proj(1024, rows)
    arguments = packed([rows], proj, None)
    run(arguments)
    proj.mul_(-0.5)
    expected = run(packed([rows], proj.clone(), None))
    assert_same_bits(run(arguments), expected)


@on_gpu
def test_strided_inputs():
    """Slices of one fused projection, as the model makes them."""
    rows = inkling_rows(150, "local", torch.bfloat16)
    arguments = packed([rows], random_proj(512, rows), 512)
    fused = torch.cat([x.flatten(1) for x in rows], 1)
    parts = fused.split([x[0].numel() for x in rows], 1)
    q, k, v, r = (part.unflatten(1, x.shape[1:]) for part, x in zip(parts, rows, strict=True))
    views = {"q_NHC": q, "k_NUC": k, "v_NUC": v, "r_NHB": r}
    assert_same_bits(run(arguments | views), run(arguments))
