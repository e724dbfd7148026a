"""draw_tokens' kernels: the bits of the kernels for whole logits, one after the other."""

import math
from typing import Any

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.draw_tokens import Drawn, cases, draw_tokens
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.draw_tokens.slices import CHUNK
from tests.kernels.compare import LOW, Arguments, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync
from tests.kernels.test_draw_tokens import assert_same

pytest.importorskip("triton")
from suzuri.kernels.draw_tokens import kernel
from suzuri.kernels.log_softmax.kernel import log_softmax
from suzuri.kernels.matmul.kernel import ours
from suzuri.kernels.sample_tokens.kernel import sample_tokens

WIDTHS = (None, CHUNK, 2 * CHUNK)


def by_unfused_kernels(given: Arguments) -> Drawn:
    """The kernels of head, draw and log-softmax, of all logits."""
    draws: Draws = given["draws"]
    logits_NV = ours(given["h_ND"], given["unembed_VD"], given["scale"], torch.float32)
    noisy_N = (draws.temperature_N > 0).float()
    divisor_N = torch.where(noisy_N > 0, draws.temperature_N, 1.0)
    tempered_NV = logits_NV / divisor_N[:, None]
    ids_N = sample_tokens(tempered_NV, noisy_N, *draws[1:], 0)
    ids_N = torch.where(logits_NV.amax(-1).isfinite(), ids_N, -1)
    at_N1 = ids_N.clamp(min=0)[:, None]
    raw_N = log_softmax(logits_NV).gather(1, at_N1)[:, 0]
    own_N = log_softmax(tempered_NV).gather(1, at_N1)[:, 0]
    sampled_N = torch.where(noisy_N > 0, own_N, 0.0)
    wants_N = given["wants_N"]
    return Drawn(
        ids_N,
        torch.where((ids_N >= 0) & (wants_N % 2 > 0), raw_N, math.nan),
        torch.where((ids_N >= 0) & (wants_N > 1), sampled_N, math.nan),
    )


def run(given: Arguments, width: int | None = None) -> Drawn:
    words = ("h_ND", "unembed_VD", "draws", "wants_N", "scale")
    given_here: list[Any] = [given[word] for word in words]
    with nan_filled():
        return Drawn(*kernel.draw_tokens(*given_here, purpose=0, width=width))


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_unfused_kernels(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    if device == "cpu":  # the interpreter's products depend on their shapes: exact numbers
        for name in ("h_ND", "unembed_VD"):
            given[name] = (given[name] * 8).round() / 8
    expected = by_unfused_kernels(given)
    zero_N = torch.zeros_like(given["wants_N"])
    certain = Draws(zero_N.float(), zero_N, zero_N, zero_N)
    likely = by_unfused_kernels(changed(given, draws=certain))
    for width in WIDTHS:
        assert_same(run(given, width), expected, f"slices of {width}")
        silent = run(changed(given, wants_N=None), width)
        assert_same(silent, Drawn(expected.ids_N, None, None), f"slices of {width}, silent")
        assert_same(run(changed(given, draws=None), width), likely, f"slices of {width}, greedy")


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_ties_and_rows_without_an_answer(device: str, broken: float):
    """h picks a column of the weight: one with a broken logit, then one with ties in two chunks."""
    unembed_VD = torch.full((4100, 16), -1.0, device=device)
    unembed_VD[:, 1:] = 0.0
    unembed_VD[slice(None) if broken == -math.inf else 4098, 0] = broken
    place_N = torch.arange(2, device=device)
    for temperature in (0.0, 1.0):
        draws = Draws(torch.full((2,), temperature, device=device), place_N, place_N, place_N)
        given: Arguments = {
            "h_ND": torch.eye(2, 16, device=device)[:1].expand(2, -1).contiguous(),
            "unembed_VD": unembed_VD,
            "draws": draws,
            "wants_N": place_N + 2,
            "scale": 0.5,
        }
        for width in WIDTHS[:2]:
            found = run(given, width)
            assert found.ids_N.tolist() == [-1, -1]
            assert found.sampled_N is not None
            assert found.sampled_N.isnan().all()
    unembed_VD[:, 0] = -1.0
    unembed_VD[[70, 2048, 4099], 0] = 2.0
    for width in WIDTHS:
        found = run(changed(given, draws=None), width)
        assert found.ids_N.tolist() == [70, 70]
        assert found.sampled_N is not None
        assert found.sampled_N.tolist() == [0.0, 0.0]


@in_interpreter
def test_no_rows():
    given = cases.build("tiny", torch.float32, generator(2))
    none = changed(given, h_ND=given["h_ND"][:0], wants_N=given["wants_N"][:0])
    none["draws"] = Draws(*(x_N[:0] for x_N in given["draws"]))
    assert [list(x_N.shape) for x_N in run(none) if x_N is not None] == [[0]] * 3


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("draw_tokens", dtype)
    given = cases.build("inkling", dtype, generator(3, "cuda"))
    draw_tokens(**given)
    with without_sync():
        found = draw_tokens(**given)
    with dispatch.force("reference"):
        assert (draw_tokens(**given).ids_N == found.ids_N).float().mean() > 0.9


@on_gpu
def test_no_more_than_the_buffer():
    """256 rows of Inkling's vocabulary: their logits would be 195 MiB."""
    h_ND = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    unembed_VD = torch.randn(200058, 512, device="cuda", dtype=torch.bfloat16)
    place_N = torch.arange(256, device="cuda")
    draws = Draws(torch.ones(256, device="cuda"), place_N, place_N, place_N)
    for wants_N in (None, torch.full_like(place_N, 3)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        draw_tokens(h_ND, unembed_VD, draws, wants_N, scale=0.1)
        assert torch.cuda.max_memory_allocated() - before < 34 << 20
