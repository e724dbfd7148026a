"""filter_logits' kernels: the kept ids of the sorting reference, which shares no step with them."""

import math

import pytest
import torch

from suzuri.kernels import exact
from suzuri.kernels.filter_logits import cases, filter_logits, reference
from tests.kernels.compare import Arguments, assert_same_bits, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.filter_logits import kernel

LAUNCHES: tuple[Arguments, ...] = (
    {},
    {"block": 512, "num_warps": 1, "summed": 512, "summing_warps": 1},
)
devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)


pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""Of the interpreter: NumPy tells what a GPU does in silence (log of 0, infinities to integers)."""


@pytest.fixture(autouse=True)
def the_kernels_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's exp, as the kernels have it: a last bit more or less in a weight may move the
    end of a nucleus among equal ids."""
    monkeypatch.setattr(exact, "exp", torch.exp)


def filters(rows: list[tuple[float, int, float]], device: str) -> Arguments:
    min_p, top_k, top_p = zip(*rows, strict=True)
    return {
        "min_p_N": torch.tensor(min_p, device=device),
        "top_k_N": torch.tensor(top_k, device=device),
        "top_p_N": torch.tensor(top_p, device=device),
    }


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_kept_ids_and_bits_of_the_reference_in_every_launch(
    device: str, case: str, dtype: torch.dtype
):
    for seed in range(1 if device == "cpu" else 5):
        given: Arguments = cases.build(case, dtype, generator(seed, device))
        expected = reference.filter_logits(**given)
        for options in LAUNCHES if device == "cuda" else LAUNCHES[case == "odd" :][:1]:
            with nan_filled():
                found = kernel.filter_logits(**given, **options)
            assert_same_bits(found, expected, f"seed {seed}, {options}")


@devices
def test_distinct_logits_and_extreme_filters(device: str):
    """Rows without ties, so that the last digits of the keys decide; a nucleus of one id, of all,
    and one that ends inside what top_k left."""
    rows = [
        (0.0, 0, 0.3),
        (0.0, 0, 0.999999),
        (0.0, 7, 1.0),
        (0.0, 50, 0.9),
        (0.2, 0, 1.0),
        (1.0, 0, 1.0),
        (0.0, 1, 0.5),
        (1e-30, 3, 1e-9),
    ]
    logits = 3 * torch.randn(len(rows), 700, generator=generator(5, device), device=device)
    given: Arguments = {"logits_NV": logits, **filters(rows, device)}
    assert_same_bits(kernel.filter_logits(**given, **LAUNCHES[1]), reference.filter_logits(**given))


@devices
def test_equal_logits_are_cut_by_id(device: str):
    logits = torch.zeros(4, 1500, device=device)
    logits[1, ::2] = -0.0
    logits[2, 700:] = 1.0
    logits[3] = -math.inf
    logits[3, [9, 1400]] = -5.0
    given: Arguments = {
        "logits_NV": logits,
        **filters([(0.0, 0, 0.5), (0.0, 1001, 1.0), (0.0, 900, 0.95), (0.0, 0, 0.5)], device),
    }
    found = kernel.filter_logits(**given, **LAUNCHES[1])
    assert_same_bits(found, reference.filter_logits(**given))
    assert [int((row > -math.inf).sum()) for row in found[:2]] == [750, 1001]
    assert (found[3] > -math.inf).nonzero().tolist() == [[9]]


@devices
def test_rows_without_an_answer_stay_so_and_harm_no_other(device: str):
    given: Arguments = cases.build("odd", torch.float32, generator(3, device))
    clean = kernel.filter_logits(**given)
    off: Arguments = filters([(0.0, 0, 1.0)] * 6, device)
    for value in (math.nan, math.inf):
        logits = given["logits_NV"].clone()
        logits[4, 11] = value
        logits[5] = -math.inf
        found = kernel.filter_logits(**changed(given, logits_NV=logits))
        assert_same_bits(found[:4], clean[:4])
        assert not math.isfinite(found[4, 11].item())
        assert (found[5] == -math.inf).all()
        # Without filters every bit stays, whatever it is.
        assert_same_bits(kernel.filter_logits(logits, **off), logits)


@in_interpreter
def test_strides_no_rows_and_fp64():
    given: Arguments = cases.build("odd", torch.float32, generator(2))
    wide = torch.zeros(6, 74)
    wide[:, ::2] = given["logits_NV"]
    found = kernel.filter_logits(**changed(given, logits_NV=wide[:, ::2]))
    assert_same_bits(found, reference.filter_logits(**given))
    none: Arguments = {name: value[:0] for name, value in given.items()}
    assert kernel.filter_logits(**none).shape == (0, 37)
    with pytest.raises(NotImplementedError, match=r"filter_logits of torch\.float64"):
        kernel.filter_logits(**changed(given, logits_NV=wide.double()))


@on_gpu
def test_rows_alone_and_no_waiting():
    assert_rows_alone_on_gpu("filter_logits", torch.float32)
    given: Arguments = cases.build("inkling", torch.float32, generator(3, "cuda"))
    with without_sync():
        found = filter_logits(**given)
    for _ in range(3):
        assert_same_bits(filter_logits(**given), found)
    assert_same_bits(found, reference.filter_logits(**given))


@on_gpu
def test_a_nucleus_of_a_wide_flat_row_does_not_overflow():
    """The weights of 200,058 equal ids sum to 2^57.6."""
    flat = torch.zeros(3, 200_058, device="cuda")
    shares = [0.5, 0.25, 1 - 2**-24]
    found = filter_logits(flat, **filters([(0.0, 0, share) for share in shares], "cuda"))
    assert (found == 0).sum(1).tolist() == [100_029, 50_015, 200_058]
