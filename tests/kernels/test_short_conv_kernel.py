"""short_conv's kernels: bit for bit the reference (products and sums only), ring included."""

import pytest
import torch

from suzuri.kernels.short_conv import cases, reference, short_conv
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.conv_batches import BATCHES, batch
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync
from tests.kernels.triton_interpreter import patch_loop_bounds

pytest.importorskip("triton")
from suzuri.kernels.short_conv import kernel

FRESH: tuple[Arguments, ...] = (
    {},
    {"rows": 4, "channels": 32, "num_warps": 1},
    {"rows": 64, "num_warps": 8},
)
ONE_LAUNCH_AND_TWO: tuple[Arguments, ...] = (
    {"short": 0},
    {"short": 0, "rows": 8, "channels": 16, "sequence_elements": 16, "num_warps": 1},
    {"short": 1000},
    {"short": 1000, "sequence_elements": 16, "num_warps": 2},
)
devices = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=in_interpreter),
        *(pytest.param("cuda", dtype, marks=on_gpu) for dtype in LOW),
    ],
)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loop_bounds(monkeypatch)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_fresh_sequences_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    expected = reference.short_conv(**given, state_LRC=None, slots_S=None)
    for options in FRESH:
        with nan_filled():
            found = kernel.short_conv(**given, state_LRC=None, slots_S=None, **options)
        assert_same_bits(found, expected, str(options))


@devices
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("taps", "ring"), [(4, 3), (4, 7), (1, 0), (2, 13)])
def test_the_ring_in_one_launch_and_in_two(
    device: str, dtype: torch.dtype, name: str, taps: int, ring: int
):
    """Old inputs are read before new ones overwrite them, whichever way the batch is cut."""
    given = batch(name, device, dtype, taps=taps)
    num_sequences = len(BATCHES[name][0])
    g = generator(3, device)
    before = torch.randn(num_sequences + 3, ring, 21, generator=g, device=device).to(dtype)
    slots = torch.randperm(num_sequences + 3, generator=g, device=device)[:num_sequences]
    expected_state = before.clone()
    expected = reference.short_conv(**given, state_LRC=expected_state, slots_S=slots)
    for options in ONE_LAUNCH_AND_TWO:
        state = before.clone()
        with nan_filled():
            found = kernel.short_conv(**given, state_LRC=state, slots_S=slots, **options)
        assert_same_bits(found, expected, str(options))
        assert_same_bits(state, expected_state, str(options))


@devices
@pytest.mark.parametrize("short", [0, 1000])
def test_views_of_any_strides_and_slots_that_are_nowhere(
    device: str, dtype: torch.dtype, short: int
):
    given = batch("ragged", device, dtype, taps=4)
    fused = torch.zeros(given["x_NC"].shape[0], 50, dtype=dtype, device=device)
    fused[:, 5:47:2] = given["x_NC"]
    filled = torch.full((8, 9, 42), 7.0, dtype=dtype, device=device)
    slots = torch.tensor([4, 1, 0, -1, 2, 5], device=device)
    view = filled[1:7, 2:9, ::2]
    expected_state = view.clone()
    # Sequence 3 begins at position 1: without a slot, what was there is zero.
    expected_state = torch.cat([expected_state, torch.zeros_like(expected_state[:1])])
    strided = changed(given, x_NC=fused[:, 5:47:2])
    found = kernel.short_conv(**strided, state_LRC=view, slots_S=slots, short=short)
    expected = reference.short_conv(**given, state_LRC=expected_state, slots_S=slots)
    assert_same_bits(found, expected)
    assert_same_bits(view.contiguous(), expected_state[:-1])
    outside = filled.clone()
    outside[1:7, 2:9, ::2] = 7.0
    assert (outside == 7.0).all()


@devices
def test_a_fresh_sequence_ignores_even_nan_in_its_slot(device: str, dtype: torch.dtype):
    given = batch("prefill", device, dtype, taps=4)
    given["positions_N"][40:] -= 2
    for short in (0, 1000):
        state = torch.full((2, 3, 21), torch.nan, dtype=dtype, device=device)
        found = kernel.short_conv(
            **given, state_LRC=state, slots_S=torch.tensor([1, 0], device=device), short=short
        )
        assert_same_bits(found, reference.short_conv(**given, state_LRC=None, slots_S=None))


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", ["short_conv", "short_conv decode"])
def test_rows_alone(op: str, dtype: torch.dtype):
    assert_rows_alone_on_gpu(op, dtype)


@on_gpu
def test_the_op_runs_the_kernel_without_waiting_and_refuses_a_gradient_with_state():
    given = batch("ragged", "cuda", torch.bfloat16, taps=4, channels=6144)
    state = torch.randn(6, 6, 6144, device="cuda").bfloat16()
    slots = torch.tensor([4, 1, 0, 3, 2, 5], device="cuda")
    expected_state = state.clone()
    expected = reference.short_conv(**given, state_LRC=expected_state, slots_S=slots)
    with without_sync():
        found = short_conv(**given, state_LRC=state, slots_S=slots)
    assert_same_bits(found, expected)
    assert_same_bits(state, expected_state)
    given["weight_CK"].requires_grad_()
    with pytest.raises(NotImplementedError, match="short_conv: no gradient with state on a GPU"):
        short_conv(**given, state_LRC=state, slots_S=slots)
