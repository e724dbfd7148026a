"""residual_norm's kernel: the bits of the kernels of its parts, one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels.residual_norm import cases, residual_norm
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.conv_batches import BATCHES, batch
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import without_sync
from tests.kernels.triton_interpreter import patch_loop_bounds

pytest.importorskip("triton")
from suzuri.kernels.moe_combine import kernel as combine_kernel
from suzuri.kernels.residual_norm import kernel
from suzuri.kernels.rms_norm import kernel as norm_kernel
from suzuri.kernels.short_conv import kernel as conv_kernel

GPU = [pytest.param("cuda", dtype, marks=on_gpu) for dtype in LOW]
CPU = [pytest.param("cpu", dtype, marks=in_interpreter) for dtype in LOW]
devices = pytest.mark.parametrize(("device", "dtype"), [*CPU, *GPU])
in_fp32 = pytest.mark.parametrize(("device", "dtype"), [*CPU[:1], *GPU])


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loop_bounds(monkeypatch)


def parts(given: Arguments) -> tuple[Tensor, Tensor]:
    """The kernels of the separate ops."""
    sequences = [given[name] for name in ("positions_N", "seq_ids_N", "seq_starts_S1")]
    state, slots = given.get("state_LRC"), given.get("slots_S")
    where = (sequences[0], sequences[1], sequences[2], state, slots)
    y_ND = conv_kernel.short_conv(given["y_ND"], given["conv_DK"], *where)
    h_ND = given["h_ND"] + y_ND
    return h_ND, norm_kernel.rms_norm(h_ND, given["norm_D"], given["eps"], h_ND.dtype)


def fused(given: Arguments) -> tuple[Tensor, Tensor]:
    memory: Arguments = {"state_LRC": None, "slots_S": None}
    return kernel.residual_norm(**(memory | given))


def drawn(name: str, device: str, dtype: torch.dtype, taps: int, width: int) -> Arguments:
    """A batch that goes on from rings. In bf16 in the interpreter, which cuts where a GPU rounds,
    of integers, so that only the norm rounds."""
    given = batch(name, device, dtype, taps=taps, channels=width)
    g = generator(5, device)
    y_ND = given.pop("x_NC")
    more = torch.randn(2, *y_ND.shape, generator=g, device=device).to(dtype)
    numbers = (y_ND, more[0], given.pop("weight_CK"), more[1][0])
    if device == "cpu" and dtype == torch.bfloat16:
        numbers = tuple(x.round() for x in numbers)
    names = ("y_ND", "h_ND", "conv_DK", "norm_D")
    return dict(zip(names, numbers, strict=True)) | given | {"eps": 1e-6}


def ring_of(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator(3, device), device=device).round().to(dtype)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_fresh_sequences(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    expected = parts(given)
    with nan_filled():
        found = fused(given)
    for one, wanted in zip(found, expected, strict=True):
        assert_same_bits(one, wanted, case)


@in_fp32
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("taps", "ring"), [(4, 3), (4, 7), (1, 0), (2, 13)])
def test_the_ring(device: str, dtype: torch.dtype, name: str, taps: int, ring: int):
    """Old inputs are read before new ones overwrite them, however the batch is cut."""
    given = drawn(name, device, dtype, taps, 21)
    num_sequences = len(BATCHES[name][0])
    before = ring_of(num_sequences + 3, ring, 21, device=device, dtype=dtype)
    order = torch.randperm(num_sequences + 3, generator=generator(4, device), device=device)
    slots = order[:num_sequences]
    slots[1] = -1  # a sequence that is kept nowhere
    expected_state = before.clone()
    expected = parts(changed(given, state_LRC=expected_state, slots_S=slots))
    state = before.clone()
    with nan_filled():
        found = fused(changed(given, state_LRC=state, slots_S=slots))
    for one, wanted in zip((*found, state), (*expected, expected_state), strict=True):
        assert_same_bits(one, wanted, name)


def single(given: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    names = ("h_ND", "conv_DK", "norm_D", "positions_N", "eps", "state_LRC", "slots_S")
    run: Any = kernel.single_rows
    slots = (given.get("inverse_M"), given.get("weights_NJ"))
    return run(given["y_ND"], *slots, *(given[name] for name in names), **options)


@devices
@pytest.mark.parametrize("slots_of", [0, 1, 8])
@pytest.mark.parametrize(("taps", "ring", "width"), [(4, 3, 21), (4, 6, 4099), (1, 2, 8)])
def test_single_rows_and_outputs_of_experts(
    device: str, dtype: torch.dtype, taps: int, ring: int, width: int, slots_of: int
):
    given = drawn("decode", device, dtype, taps, width)
    rows, g = len(given["y_ND"]), generator(7, device)
    before = ring_of(rows + 2, ring, width, device=device, dtype=dtype)
    slots = torch.tensor([4, -1, 0, 2], device=device)
    now = given
    if slots_of:
        y_MD = ring_of(rows * slots_of, width, device=device, dtype=dtype)
        inverse_M = torch.randperm(rows * slots_of, generator=g, device=device)
        weights_NJ = torch.randint(-3, 4, (rows, slots_of), generator=g, device=device).float()
        if device == "cuda":
            weights_NJ += torch.rand(weights_NJ.shape, generator=g, device=device)
        now = changed(given, y_ND=y_MD, inverse_M=inverse_M, weights_NJ=weights_NJ)
        combined = combine_kernel.moe_combine(y_MD, inverse_M, weights_NJ, dtype)
        given = changed(given, y_ND=combined)
    expected_state = before.clone()
    expected = parts(changed(given, state_LRC=expected_state, slots_S=slots))
    for options in ({}, {"num_warps": 1}, {"num_warps": 8}):
        state = before.clone()
        with nan_filled():
            found = single(changed(now, state_LRC=state, slots_S=slots), **options)
        for one, wanted in zip((*found, state), (*expected, expected_state), strict=True):
            assert_same_bits(one, wanted, str(options))


@devices
@pytest.mark.parametrize("width", [4096, 4099, 6144, 8192])
def test_rows_of_two_chunks(device: str, dtype: torch.dtype, width: int):
    given = drawn("decode", device, dtype, 4, width)
    state = ring_of(4, 6, width, device=device, dtype=dtype)
    states = [state.clone(), state.clone()]
    slots = torch.tensor([2, 0, 3, 1], device=device)
    with nan_filled():
        found = fused(changed(given, state_LRC=states[0], slots_S=slots))
    expected = parts(changed(given, state_LRC=states[1], slots_S=slots))
    for one, wanted in zip((*found, states[0]), (*expected, states[1]), strict=True):
        assert_same_bits(one, wanted)


@devices
def test_n25_views_of_any_strides(device: str, dtype: torch.dtype):
    given = drawn("ragged", device, dtype, 4, 21)
    spread = {}
    for name in ("y_ND", "h_ND"):
        wide = torch.zeros(given[name].shape[0], 50, dtype=dtype, device=device)
        wide[:, 5:47:2] = given[name]
        spread[name] = wide[:, 5:47:2]
    taps = torch.zeros(4, 42, dtype=dtype, device=device)
    taps[:, ::2] = given["conv_DK"].T
    spread["conv_DK"] = taps.T[::2]
    state = torch.full((7, 9, 42), 7.0, dtype=dtype, device=device)
    slots = torch.tensor([4, 1, 0, -1, 2, 5], device=device)
    views = [x[1:7, 2:9, ::2] for x in (state, state.clone())]
    found = fused(changed(given, **spread, state_LRC=views[0], slots_S=slots))
    expected = parts(changed(given, state_LRC=views[1], slots_S=slots))
    for one, wanted in zip((*found, views[0]), (*expected, views[1]), strict=True):
        assert_same_bits(one, wanted)
    state[1:7, 2:9, ::2] = 7.0
    assert (state == 7.0).all()


@in_interpreter
def test_no_rows_and_what_is_not_covered():
    given = drawn("decode", "cpu", torch.float32, 4, 21)
    fields = ("y_ND", "h_ND", "conv_DK", "norm_D")
    assert kernel.covers(*(given[name] for name in fields))
    assert not kernel.covers(*(given[name].double() for name in fields))
    wide = torch.zeros(1, kernel.MOST + 1)
    assert not kernel.covers(wide, wide, wide.T, wide[0])
    none = changed(given, y_ND=given["y_ND"][:0], h_ND=given["h_ND"][:0])
    assert [x.shape for x in fused(none)] == [(0, 21)] * 2


@on_gpu
@pytest.mark.parametrize("name", ["decode", "ragged"])
def test_the_op_runs_the_kernel_without_waiting(name: str):
    given = drawn(name, "cuda", torch.bfloat16, 4, 6144)
    num_sequences, is_single = len(BATCHES[name][0]), name == "decode"
    state = torch.randn(num_sequences, 6, 6144, device="cuda").bfloat16()
    states = [state.clone(), state.clone()]
    slots = torch.randperm(num_sequences, device="cuda")
    expected = parts(changed(given, state_LRC=states[1], slots_S=slots))
    with without_sync():
        now = changed(given, state_LRC=states[0], slots_S=slots)
        found = residual_norm(**now, single_rows=is_single)
    for one, wanted in zip((*found, states[0]), (*expected, states[1]), strict=True):
        assert_same_bits(one, wanted)
